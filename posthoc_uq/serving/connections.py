"""Connections that send no request, or take no answer, keep nobody else out: the protocol of ``posthoc-uq serve``."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

CONNECTIONS = 400
"""At once. One more ends the one that has been without a whole request for longest."""
_NEW = 0.25  # seconds in which a connection is not yet ended for another one
_LOOK = 2.0  # seconds between two looks at a connection
_TO_ASK, _TO_TAKE = 10.0, 30.0  # seconds for the head of a request to arrive, and for an answer to be taken


class Connection(H11Protocol):
    """uvicorn's. That ends a connection which sends nothing after an answer, but neither one that sends nothing at all,
    nor one that sends a part of a request, nor one that does not read.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Make room for it, and begin to look at it."""
        super().connection_made(transport)
        self._since = self.loop.time()  # when it was made, or got its last answer
        self._next_look = self.loop.call_later(_LOOK, self._look)
        if len(self.connections) <= CONNECTIONS:
            return
        all_of_them = [one for one in self.connections if isinstance(one, Connection)]
        there = [one for one in all_of_them if not one.transport.is_closing()]
        old = [one for one in there if self._since - one._since > _NEW and not one._asked]
        if len(there) > CONNECTIONS and old:
            min(old, key=lambda one: one._since).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """No more looks."""
        self._next_look.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """The next request has its time from now on."""
        self._since = self.loop.time()
        super().on_response_complete()

    @property
    def _asked(self) -> bool:
        """Whether a whole request is under way, and the answers before it were taken."""
        cycle = self.cycle
        return not (cycle is None or cycle.response_complete or cycle.more_body or self.flow.write_paused)

    def _look(self) -> None:
        still = self.loop.time() - self._since
        waits_for_head = self.cycle is None or self.cycle.response_complete
        unread = self.transport.get_write_buffer_size() > 0
        if still > _TO_TAKE if unread else still > _TO_ASK and waits_for_head:
            self.transport.abort()
        else:
            self._next_look = self.loop.call_later(_LOOK, self._look)
