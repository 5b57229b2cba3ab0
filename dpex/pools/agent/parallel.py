"""How many connections an agent has, chosen by what each number was measured to carry. PURE.

One is enough on most links. Where it is busy, and the way is long or loses what is sent, `MORE` are tried beside it,
then twice as many, and so on. Each number is kept only if it carries `WORTH` times as much as the one before. After one
that does not, nothing is tried for `REST_S`, and for twice as long after each further one, up to `MOST_REST_S`.
"""

from __future__ import annotations

from dataclasses import dataclass

from dpex.pools.agent.traffic import Traffic

MORE = 4
"""Connections that are tried first, beside the one that there is."""
MOST = 16
"""More cost descriptors of the trainer, of which it has a thousand as a rule, and gain little."""
WORTH = 1.2
"""A connection's rate varies by some tenths where packets are lost."""
MEASURED_S = 2.0
"""Seconds of sending from which a rate is taken: forty round trips of 50 ms."""
SETTLES_S = 1.0
"""Seconds of sending after a change that do not count: new connections begin slowly."""
BUSY = 0.5
"""The share of the time in which a connection that limits is sending at least."""
LONG_S = 0.01
"""A round trip from which on what may be under way can limit: at 1 ms it fills 10 Gbit/s."""
LOST = 1e-3
"""The part of what is sent that is sent again, from which on losses limit."""
REST_S, MOST_REST_S = 60.0, 960.0
"""A link may change; a try costs a second or two."""
NEVER = -1e9


@dataclass(frozen=True, kw_only=True)
class ConnectionsWanted:
    """How many connections there are to be beside the first one. gained: of a change that is kept, how many times as
    much they carry; None while that is not known."""

    extra: int
    gained: float | None = None


class ConnectionCount:
    """Told of the traffic now and then, it says when there are to be others."""

    def __init__(self) -> None:
        self.extra = 0
        self._kept = 0
        self._rate_before = 0.0
        """Bytes per second of sending with the number that is kept."""
        self._rests_until = NEVER
        self._rest_s = REST_S
        self._counted_at: float | None = None
        self._settling_s = 0.0
        self._bytes = self._resent = 0
        self._sending_s = 0.0

    def look(self, traffic: Traffic, now: float) -> ConnectionsWanted | None:
        """What the connections carried since the last look; None: nothing is to change."""
        if self._counted_at is None or now < self._rests_until:
            self._begin(now)
            return None
        if self._settling_s > 0:
            self._settling_s -= traffic.sending_s
            self._begin(now, self._settling_s)
            return None
        self._bytes += traffic.sent_bytes
        self._resent += traffic.resent_bytes
        self._sending_s += traffic.sending_s
        if self._sending_s < MEASURED_S:
            if now - self._counted_at > MEASURED_S / BUSY and self.extra == self._kept:
                self._begin(now)  # it is not busy
            return None
        return self._judged(traffic.round_trip_s, now)

    def _judged(self, round_trip_s: float, now: float) -> ConnectionsWanted | None:
        """A rate was measured: of the number that is kept, or of one on trial."""
        rate = self._bytes / self._sending_s
        if self.extra == self._kept:
            limits = round_trip_s >= LONG_S or self._resent >= LOST * self._bytes
            if not limits or self.extra >= MOST:
                self._rests_until = now + REST_S
                self._begin(now)
                return None
            self._rate_before = rate
            return self._change(2 * self.extra or MORE, now)
        if rate >= WORTH * self._rate_before:
            gained, self._kept, self._rest_s = rate / self._rate_before, self.extra, REST_S
            self._begin(now)
            return ConnectionsWanted(extra=self.extra, gained=gained)
        self._rest(now)
        return self._change(self._kept, now)

    def failed(self, now: float) -> None:
        """Those that were to be made cannot be."""
        self.extra = self._kept
        self._rest(now)
        self._begin(now)

    def _rest(self, now: float) -> None:
        """Something was tried in vain."""
        self._rests_until, self._rest_s = now + self._rest_s, min(2 * self._rest_s, MOST_REST_S)

    def _change(self, extra: int, now: float) -> ConnectionsWanted:
        self.extra = extra
        self._begin(now, SETTLES_S)
        return ConnectionsWanted(extra=extra)

    def _begin(self, now: float, settling_s: float = 0.0) -> None:
        self._counted_at, self._settling_s = now, settling_s
        self._bytes = self._resent = 0
        self._sending_s = 0.0
