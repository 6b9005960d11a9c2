"""Many replicas in virtual time, behind the frontend's choice of one, in as many processes as there
are cores. What they answer does not depend on the number of processes.
"""

import contextlib
import gc
import heapq
import math
import multiprocessing
import os
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from nanovllm.apps.plan.options import Objective
from nanovllm.apps.plan.planned_requests import PlannedRequest
from nanovllm.apps.plan.replica import Replica, random_drafts
from nanovllm.apps.plan.report import Answers, Outcome
from nanovllm.apps.plan.step_cost import StepCost
from nanovllm.factory import make_scheduler
from nanovllm.options.config import Config
from nanovllm.utils.affinity import order

NEWS_SECONDS = 0.01
"""So late, at most, the frontend learns that a request has ended: until then the replicas of all
processes go on without it."""
_FEW_REPLICAS = 8
"""A process for fewer replicas takes longer to start than it saves."""

Assigned = list[tuple[int, PlannedRequest]]
"""Requests, each with the number of its replica."""


@dataclass(frozen=True)
class Fleet:
    """Equal engines.

    Args:
        cost: what their schedulers are made of, and how long steps take.
        acceptance: how likely a draft is right, if those before it are.
    """

    cost: StepCost
    objective: Objective
    acceptance: float = 0.0

    def outcome(self, requests: Iterable[PlannedRequest], num_replicas: int) -> Outcome:
        """Return what so many replicas answer; each request goes where its conversation prefers.

        Raises:
            ConfigError: a request fits no engine of this kind.
        """
        num_parts = max(1, min(os.cpu_count() or 1, num_replicas // _FEW_REPLICAS))
        loads = {str(number): 0 for number in range(num_replicas)}
        with contextlib.ExitStack() as stack:
            stack.callback(gc.unfreeze)  # of what `_Part` froze: the next fleet needs the memory
            own = _Part(self, range(0, num_replicas, num_parts))
            others = [
                stack.enter_context(_Process(self, range(first, num_replicas, num_parts)))
                for first in range(1, num_parts)
            ]

            def advance(assigned: Assigned, until: float) -> None:
                for number, other in enumerate(others, 1):
                    other.send(([one for one in assigned if one[0] % num_parts == number], until))
                found = own.advance([one for one in assigned if one[0] % num_parts == 0], until)
                for other in others:
                    found |= other.receive()
                loads.update((str(number), num_requests) for number, num_requests in found.items())

            assigned: Assigned = []
            for request in requests:
                if assigned and request.arrival >= assigned[0][1].arrival + NEWS_SECONDS:
                    advance(assigned, request.arrival)
                    assigned = []
                name = order(request.conversation, loads)[0] if num_replicas > 1 else "0"
                loads[name] += 1
                assigned.append((int(name), request))
            advance(assigned, math.inf)
            answers = own.answers()
            for other in others:
                other.send(None)
                answers.merge(other.receive())
        return {"replicas": num_replicas, **answers.outcome()}


class _Part:
    """The replicas of a process, by their numbers."""

    def __init__(self, fleet: Fleet, numbers: range) -> None:
        self._answers = Answers(fleet.objective)
        self._turns: list[tuple[float, int]] = []  # of those that have something to do
        self._replicas = {
            number: Replica(
                make_scheduler(Config(**fleet.cost.options), fleet.cost.info),
                fleet.cost,
                self._answers.add,
                queue_depth=int(fleet.cost.info.runs_ahead),
                drafts=random_drafts(fleet.acceptance, number),
            )
            for number in numbers
        }
        gc.freeze()  # the pools are large, and stay

    def advance(self, assigned: Assigned, until: float) -> dict[int, int]:
        """Take requests, and run up to a moment. Return the number of requests of each replica that
        has done something.
        """
        turns = self._turns
        for number, request in assigned:
            replica = self._replicas[number]
            if replica.clock == math.inf:
                heapq.heappush(turns, (request.arrival, number))
            replica.add(request)
        found = {}
        while turns and turns[0][0] < until:
            number = turns[0][1]
            replica = self._replicas[number]
            replica.turn()
            found[number] = replica.num_requests
            if replica.clock == math.inf:
                heapq.heappop(turns)
            else:
                heapq.heapreplace(turns, (replica.clock, number))
        return found

    def answers(self) -> Answers:
        """Return what all requests got, at the end."""
        for replica in self._replicas.values():
            self._answers.add_replica(replica)
        return self._answers


class _Process(contextlib.AbstractContextManager["_Process"]):
    """A part in a process of its own."""

    def __init__(self, fleet: Fleet, numbers: range) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, fleet, numbers), daemon=True)
        self._process.start()
        self.send = self._connection.send

    def receive(self) -> Any:
        """Return what `_Part.advance` did, and after None was sent what `_Part.answers` did."""
        found = self._connection.recv()
        if isinstance(found, Exception):
            raise found
        return found

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()


def _work(connection: Connection, fleet: Fleet, numbers: range) -> None:
    part = _Part(fleet, numbers)
    try:
        for assigned, until in iter(connection.recv, None):
            connection.send(part.advance(assigned, until))
        connection.send(part.answers())
    except Exception as error:
        connection.send(error)
