"""The ClientApp: a site that Flower calls; start it with `flower-supernode --node-config site.toml`.

An order is obeyed only if the federation's server has signed it for this site (signing.py) and the site's own rules
allow it (site_config.py). Otherwise it is refused and logged before its content is read. A site that cannot carry out
an order replies with a problem. The text of an error may quote data, so it goes to the site's own log only; the text
of a refusal quotes nothing but the request, so it is sent.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fednh.errors import Refused
from fednh.flower import protocol, signing
from fednh.flower.audit import SiteEvents
from fednh.flower.layout import StateFolder
from fednh.flower.signing import ssh_fingerprint
from fednh.flower.site import Seal, Site, finalize_reply
from fednh.flower.site_config import Agreement, SiteConfig, read_site_config
from fednh.io.files import keep_private
from fednh.machine import one_thread
from fednh.text import one_line

log = logging.getLogger("flwr")


@dataclass(frozen=True)
class VerifiedMessage:
    """One message to work on."""

    site_config: SiteConfig
    content: RecordDict
    guard: signing.ReplayGuard
    agreement: Agreement
    events: SiteEvents

    def site(self) -> Site:
        return Site(self.site_config, *protocol.read_config(self.content), self.agreement)


Handler = Callable[[VerifiedMessage], RecordDict]


def _hello(message: VerifiedMessage) -> RecordDict:
    hello, times = message.site().hello()
    message.events.facts["greeting"] = times
    if times == 1 and not message.site_config.divided:
        message.events.new()
    return hello.write()


def _notice(message: VerifiedMessage) -> RecordDict:
    words = protocol.read_notice(message.content)
    if message.events.times:
        log.warning("the server says: %s", words)
    return protocol.ack()


def _answer(message: VerifiedMessage) -> RecordDict:
    order, policy = protocol.Order.read(message.content), message.site_config.policy
    policy.check_order(order)
    site = message.site()
    received = site.read(message.content)
    # From here on the samples are used. That this fails may say something about them, so it counts, too.
    if message.guard.count(signing.Work.of(message.content, site.basis(order)), policy.rounds):
        message.events.new()
    return site.answer(order, *received).write()


def _handle(work: Handler, message: Message, context: Context) -> Message:
    """Check the order, do it, sign the reply."""
    seal: Seal | None = None  # a reply to a forged order is not signed
    events: SiteEvents | None = None
    name = str(context.node_config.get("site", ""))
    try:
        site_config = read_site_config(context.node_config)
        name = site_config.site
        keep_private(site_config.home)
        events = SiteEvents(site_config.home, name, message)
        envelope, guard = _accepted(site_config, message, context)
        seal = partial(signing.sign_reply, key=signing.read_site_private(site_config.key), envelope=envelope)
        order = signing.without_signature(message.content)
        events.asked(ssh_fingerprint(site_config.orders.read_text()), envelope.federation, order)
        key = signing.key_fingerprint(signing.read_orders_public(site_config.orders))
        agreement = Agreement(StateFolder(site_config.home).agreement(site_config.site, key))
        with one_thread():
            content = work(VerifiedMessage(site_config, order, guard, agreement, events))
        reply = finalize_reply(content, events, seal)
    except Refused as error:
        data, cause = message.metadata, error.__cause__  # the cause may quote data: it stays in the site's own logs
        why = str(error) if cause is None else f"{error}: {cause}"
        reply = finalize_reply(protocol.error_reply(f"refused: {error}", name), events, seal, refused=why)
        if events is None or events.times:
            log.error("refused: %s (message %r of node %d)", one_line(why), data.message_type[:50], data.src_node_id)
    except Exception as error:
        problem = protocol.error_reply(f"{type(error).__name__}; the site's own log says more", name)
        reply = finalize_reply(problem, events, seal, refused=f"{type(error).__name__}: {error}")
        if events is None or events.times:
            log.error("this site could not do what it was asked", exc_info=error)
    return Message(reply, reply_to=message)


def _accepted(
    site_config: SiteConfig, message: Message, context: Context
) -> tuple[signing.Envelope, signing.ReplayGuard]:
    """The order's envelope, with this site's name; Refused unless the server signed it and it is new."""
    data = message.metadata
    if data.dst_node_id != context.node_id or data.run_id != context.run_id:
        raise Refused("the message is for another node or run")
    known = signing.Envelope("", context.run_id, data.message_type, data.group_id, context.node_id, site_config.site)
    public = signing.read_orders_public(site_config.orders)
    envelope = signing.check_order(message.content, public, known)
    guard = signing.ReplayGuard(site_config.home, site_config.site, public)
    guard.accept(envelope.counter)
    return replace(envelope, site=site_config.site), guard


app = ClientApp()
app.query()(partial(_handle, _hello))
app.query(protocol.NOTICE.partition(".")[2])(partial(_handle, _notice))
app.train()(partial(_handle, _answer))
app.evaluate()(partial(_handle, _answer))
