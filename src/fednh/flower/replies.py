"""Reads the replies of sites, and says what is wrong with those that cannot be used."""

from __future__ import annotations

from flwr.app import RecordDict

from fednh.core.checks import Form
from fednh.flower import messages
from fednh.flower.identity import Identity
from fednh.flower.mailbox import Letter, Reply
from fednh.flower.messages import Answer, Order, SiteProblem
from fednh.flower.parcels import Broken
from fednh.words import one_line


def content_of(reply: Reply) -> RecordDict:
    """The records of a reply; if it is an error, raise it."""
    if isinstance(reply, Broken):
        raise reply.problem
    if reply.has_error():
        raise SiteProblem(one_line(str(reply.error.reason or f"error {reply.error.code}"), 500))
    return reply.content


def why(error: Exception) -> str:
    """What was wrong with a received message; an unexpected error is named with its type."""
    foreseen = isinstance(error, ValueError | SiteProblem)
    return str(error) if foreseen else f"{type(error).__name__}: {one_line(str(error), 200)}"


def read_answer(
    letter: Letter, order: Order, reply: Reply, form: Form, device: str, identity: Identity | None
) -> tuple[Answer, RecordDict]:
    """The answer to this order, and the records that it came in.

    A wrong answer raises; `SiteProblem` if the site itself reports a problem.
    """
    content = content_of(reply)
    if identity is not None:
        messages.check_problem(content)
        content, *_ = identity.opened(letter, content)
    answer = Answer.read(content, form if order.round else None, device)
    if (answer.client, answer.round) != (order.client, order.round):
        raise ValueError(f"it is for client {answer.client} and round {answer.round}")
    if order.round and answer.upload is None:
        raise ValueError("it has no upload")
    return answer, content
