"""What leaves a site: every reply passes here, last, before it is sent.

A reply holds some of these records and nothing else:

    said      who the site is and what its data are like (`Hello`), a problem in words, or an acknowledgement
    facts     its number and the round, samples processed, their loss; as far as the owner's rules allow
    upload    what the method declares (docs/what-leaves-a-site.md has it by method)
    figures   metrics of its personal and of the global model; as far as the owner's rules allow

It is written into the site's audit log and signed. A personal model, a sample or a path is in none of them.
"""

from __future__ import annotations

from collections.abc import Callable

from flwr.app import RecordDict

from fednh.errors import Refused
from fednh.flower.audit_events import SiteEvents
from fednh.flower.messages import Answer
from fednh.flower.policy import METRICS, Policy

RECORDS = ("said", "facts", "upload", "figures")
Seal = Callable[[RecordDict], RecordDict]


def allowed(answer: Answer, policy: Policy | None) -> Answer:
    """The answer without the metrics that the site's owner keeps; without a policy all of it."""
    return answer if policy is None else answer.without({*METRICS} - {*policy.metrics})


def leave(content: RecordDict, events: SiteEvents | None, seal: Seal | None, refused: str | None = None) -> RecordDict:
    """The reply as it is sent: checked, logged, signed. `refused` says why an order was not obeyed."""
    if unknown := sorted(set(content) - set(RECORDS)):
        raise Refused(f"a reply would hold {unknown[0]!r}, which is not among what leaves a site")
    if events is not None:
        content = events.left(content) if refused is None else events.refused(refused, content)
    return seal(content) if seal is not None else content
