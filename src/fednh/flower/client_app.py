"""The ClientApp: a site that Flower calls; start it with `flower-supernode --node-config "data=... site=... state=..."`

A site that cannot do what it is asked says why in a sentence; what is not foreseen is told by its kind alone, because
the words of an error may quote data, and in full in the site's own log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fednh.core.rounds import one_thread
from fednh.errors import RunError, UserError
from fednh.flower import messages
from fednh.flower.site import Place, Site, read_place
from fednh.words import one_line

log = logging.getLogger("flwr")


def client_app(home: Path | None = None, models: Path | None = None) -> ClientApp:
    """A ClientApp; a simulation says here where its sites keep their things."""
    app = ClientApp()
    place = partial(_place, home=home, models=models)
    app.query()(partial(_handle, _hello, place))
    app.train()(partial(_handle, _answer, place))
    app.evaluate()(partial(_handle, _answer, place))
    return app


def _place(context: Context, home: Path | None, models: Path | None) -> Place:
    return read_place(context.node_config, home, models)


def _hello(place: Place, content: RecordDict) -> RecordDict:
    return Site(place, *messages.read_config(content)).hello().write()


def _answer(place: Place, content: RecordDict) -> RecordDict:
    site = Site(place, *messages.read_config(content))
    return site.answer(messages.Order.read(content), *site.read(content)).write()


def _handle(
    work: Callable[[Place, RecordDict], RecordDict],
    place_of: Callable[[Context], Place],
    message: Message,
    context: Context,
) -> Message:
    place = None
    try:
        place = place_of(context)
        with one_thread():
            content = work(place, message.content)
    except (UserError, RunError) as error:
        log.error("%s", one_line(str(error)))
        content = messages.sorry(str(error))
    except Exception as error:
        log.exception("this site could not do what it was asked")
        words = f": {error}" if place is not None and place.divided else ""
        content = messages.sorry(f"{type(error).__name__}{words}")
    return Message(content, reply_to=message)


app = client_app()
