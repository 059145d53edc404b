"""The ClientApp: a site that Flower calls; start it with `flower-supernode --node-config site.toml`.

An order is obeyed only if the federation's server has signed it for this site (signing.py) and the site's own rules
allow it (policy.py). Otherwise it is refused and logged before its content is read. A site that cannot carry out an
order replies with a problem. The text of an error may quote data, so it goes to the site's own log only; the text of a
refusal quotes nothing but the request, so it is sent.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fednh.core.machine import one_thread
from fednh.errors import Refused, RunError, UserError
from fednh.flower import messages, signing
from fednh.flower.audit_events import SiteEvents
from fednh.flower.keys import fingerprint
from fednh.flower.layout import StateFolder
from fednh.flower.leaving import Seal, leave
from fednh.flower.policy import Agreement
from fednh.flower.site import Place, Site, read_place
from fednh.storage.files import keep_private
from fednh.words import one_line

log = logging.getLogger("flwr")


@dataclass(frozen=True)
class Duty:
    """One message to work on."""

    place: Place
    content: RecordDict
    # None in a simulation:
    book: signing.OrderBook | None = None
    agreement: Agreement | None = None
    events: SiteEvents | None = None

    def site(self) -> Site:
        return Site(self.place, *messages.read_config(self.content), self.agreement)


Handler = Callable[[Duty], RecordDict]


def client_app(home: Path | None = None, run: Path | None = None) -> ClientApp:
    """A ClientApp. A simulation passes a folder for its sites' states, and its run folder; orders need no signature."""
    app = ClientApp()
    handle = partial(_simulated, home, run) if home is not None else _deployed
    app.query()(partial(handle, _hello))
    app.query(messages.NOTICE.partition(".")[2])(partial(handle, _notice))
    app.train()(partial(handle, _answer))
    app.evaluate()(partial(handle, _answer))
    return app


def _hello(duty: Duty) -> RecordDict:
    hello, times = duty.site().hello()
    if duty.events is not None:
        duty.events.facts["greeting"] = times
        if times == 1 and not duty.place.divided:
            duty.events.new()
    return hello.write()


def _notice(duty: Duty) -> RecordDict:
    words = messages.read_notice(duty.content)
    if duty.events is None or duty.events.times:
        log.warning("the server says: %s", words)
    return messages.noted()


def _answer(duty: Duty) -> RecordDict:
    order, policy = messages.Order.read(duty.content), duty.place.policy
    if policy is None or duty.book is None:
        site = duty.site()
        return site.answer(order, *site.read(duty.content)).write()
    policy.check_order(order)
    site = duty.site()
    received = site.read(duty.content)
    # From here on the samples are used. That this fails may say something about them, so it counts, too.
    new = duty.book.count(signing.Work.of(duty.content, site.basis(order)), policy.rounds)
    if new and duty.events is not None:
        duty.events.new()
    return site.answer(order, *received).write()


def _simulated(home: Path, run: Path | None, work: Handler, message: Message, context: Context) -> Message:
    """In a simulation the user is server and sites at once: nothing is signed, and errors are sent in full."""
    try:
        with one_thread():
            content = work(Duty(read_place(context.node_config, home, run), message.content))
    except (UserError, RunError) as error:
        content = messages.sorry(str(error))
    except Exception as error:
        log.exception("this site could not do what it was asked")
        content = messages.sorry(f"{type(error).__name__}: {error}")
    return Message(content, reply_to=message)


def _deployed(work: Handler, message: Message, context: Context) -> Message:
    """Check the order, do it, sign the reply."""
    seal: Seal | None = None  # a reply to a forged order is not signed
    events: SiteEvents | None = None
    name = str(context.node_config.get("site", ""))
    try:
        place = read_place(context.node_config)
        name = place.site
        keep_private(place.home)
        events = SiteEvents(place.home, name, message)
        envelope, book = _accepted(place, message, context)
        seal = partial(signing.sign_reply, key=signing.read_site_private(place.key), envelope=envelope)
        order = signing.unsealed(message.content)
        events.asked(fingerprint(place.orders.read_text()), envelope.federation, order)
        key = signing.fingerprint(signing.read_orders_public(place.orders))
        agreement = Agreement(StateFolder(place.home).agreement(place.site, key))
        with one_thread():
            content = work(Duty(place, order, book, agreement, events))
        reply = leave(content, events, seal)
    except Refused as error:
        data, cause = message.metadata, error.__cause__  # the cause may quote data: it stays in the site's own logs
        why = str(error) if cause is None else f"{error}: {cause}"
        reply = leave(messages.sorry(f"refused: {error}", name), events, seal, refused=why)
        if events is None or events.times:
            log.error("refused: %s (message %r of node %d)", one_line(why), data.message_type[:50], data.src_node_id)
    except Exception as error:
        sorry = messages.sorry(f"{type(error).__name__}; the site's own log says more", name)
        reply = leave(sorry, events, seal, refused=f"{type(error).__name__}: {error}")
        if events is None or events.times:
            log.error("this site could not do what it was asked", exc_info=error)
    return Message(reply, reply_to=message)


def _accepted(place: Place, message: Message, context: Context) -> tuple[signing.Envelope, signing.OrderBook]:
    """The order's envelope, with this site's name; Refused unless the server signed it and it is new."""
    data = message.metadata
    if data.dst_node_id != context.node_id or data.run_id != context.run_id:
        raise Refused("the message is for another node or run")
    known = signing.Envelope("", context.run_id, data.message_type, data.group_id, context.node_id, place.site)
    public = signing.read_orders_public(place.orders)
    envelope = signing.check_order(message.content, public, known)
    book = signing.OrderBook(place.home, place.site, public)
    book.accept(envelope.counter)
    return replace(envelope, site=place.site), book


app = client_app()
