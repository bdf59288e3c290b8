"""Detectors of the machine and of settings: speed and memory against the plan, slowdowns, data wait, stragglers, memory
growth, throttled GPUs, clocks, learning rate, loss scale.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bessemer.guard.alarm import BLOCK, Alarm, Record, Severity, StepBlock, debounce, make_alarm, median, theil_sen
from bessemer.guard.losses import REARM
from bessemer.plan.actual import WARM_UP, HostLoad, find_gaps, measure_steps, memory_gap, speed_gap
from bessemer.plan.expect import ExpectedRun
from bessemer.spec.guard import GuardSpec

WINDOW = 32  # compared steps
PLAN_REARM = 4  # windows within the error bar before the same gap is reported again


class PlanGapDetector:
    """An alarm when speed or memory leave the plan's error bar. `probe` measures the host's load, only for an alarm."""

    def __init__(self, expected: ExpectedRun, probe: Callable[[], HostLoad]) -> None:
        self.expected, self.probe = expected, probe
        self.seen = 0
        self._window: deque[Record] = deque(maxlen=WINDOW)
        self._gaps: dict[str, int] = {}

    def step(self, record: Record) -> list[Alarm]:
        self.seen += 1
        if self.seen > WARM_UP:
            self._window.append(record)
        if self.seen <= WARM_UP or (self.seen - WARM_UP) % WINDOW:
            return []
        measured = measure_steps(self._window, skip=0)
        if measured is None:
            return []
        gaps = {"plan_speed": speed_gap(self.expected, measured), "plan_memory": memory_gap(self.expected, measured)}
        if (ratio := gaps["plan_speed"]) is not None and ratio < 1:  # a faster run is no trouble
            gaps["plan_speed"] = None
        new = [kind for kind, gap in gaps.items() if debounce(self._gaps, kind, gap is not None, PLAN_REARM)]
        explained = find_gaps(self.expected, measured, self.probe) if new else {}
        return [Alarm(kind, int(record["step"]), "note", explained[kind]) for kind in new]


LEAST_DELAY = 0.02  # share of a step that a slow rank must cost the others
LASTING = 4  # consecutive blocks of slowness, besides the seconds in the spec
POINTS = 16  # of the line through memory
AHEAD = 8  # the line is extrapolated by this multiple of its length


@dataclass
class SpeedDetector:
    """Time per token against the window, the share of data wait, and ranks slower than their peers.

    `rank_step_s` holds each rank's own time without waiting for the others (`StepPace`). Not every step has it.
    """

    guard: GuardSpec
    hosts: list[str] = field(default_factory=list)  # of the ranks
    levels: list[float] = field(default_factory=list)  # seconds per token
    slow: list[float] = field(default_factory=list)  # the same, of consecutive slow blocks
    slow_s: float = 0.0  # their duration
    waits: int = 0  # consecutive blocks that waited for data
    waits_s: float = 0.0
    ranks: dict[str, int] = field(default_factory=dict)  # slow rank -> consecutive blocks
    active: dict[str, int] = field(default_factory=dict)

    def block(self, block: StepBlock) -> list[Alarm]:
        took_s = sum(record["step_s"] for record in block.attempts)
        return self._slowdown(block, took_s) + self._data_wait(block, took_s) + self._stragglers(block)

    def _slowdown(self, block: StepBlock, took_s: float) -> list[Alarm]:
        detect = self.guard.detect
        keep = detect.window // BLOCK
        now = median([1 / max(record["tokens_per_s"], 1e-9) for record in block.attempts])
        usual = median(self.levels) if len(self.levels) * BLOCK >= detect.warmup else now
        lasts = len(self.slow) >= LASTING and self.slow_s >= detect.slow_for
        if now > detect.slowdown * usual and not (lasts and len(self.slow) >= keep):
            self.slow, self.slow_s = [*self.slow, now][-keep:], self.slow_s + took_s
        else:  # a whole window of slow blocks is the new speed
            self.levels = [*(self.slow if lasts and len(self.slow) >= keep else self.levels), now][-keep:]
            self.slow, self.slow_s = [], 0.0
        lasts = len(self.slow) >= LASTING and self.slow_s >= detect.slow_for
        if not debounce(self.active, "slowdown", lasts, REARM):
            return []
        symptom = f"{1 / now:,.0f} tokens/s, usually {1 / usual:,.0f}"
        return make_alarm("slowdown", block.step, "warning", symptom, 0.9, tokens_per_s=1 / now, usual=1 / usual)

    def _data_wait(self, block: StepBlock, took_s: float) -> list[Alarm]:
        detect = self.guard.detect
        share = sum(record["data_wait_s"] for record in block.attempts) / max(took_s, 1e-9)
        bad = share > detect.data_wait
        self.waits, self.waits_s = (self.waits + 1, self.waits_s + took_s) if bad else (0, 0.0)
        if not debounce(self.active, "data_wait", self.waits >= LASTING and self.waits_s >= detect.slow_for, REARM):
            return []
        symptom = f"{100 * share:.0f} % of the time is spent waiting for data"
        return make_alarm("data_wait", block.step, "warning", symptom, 0.95, share=share)

    def _stragglers(self, block: StepBlock) -> list[Alarm]:
        """Ranks whose own work takes longer than the median rank's by enough to delay the others."""
        reported = [record["rank_step_s"] for record in block.attempts if record.get("rank_step_s")]
        if not reported:
            return []
        times: list[float] = reported[-1]
        usual = sorted(times)[(len(times) - 1) // 2]  # the faster one of two
        step_s = median([record["step_s"] for record in block.attempts])
        slow = [
            str(rank) for rank, time in enumerate(times)
            if time > self.guard.detect.straggler * usual and time - usual > LEAST_DELAY * step_s
        ]  # fmt: skip
        self.ranks = {rank: self.ranks.get(rank, 0) + 1 for rank in slow}
        lasting = {int(rank): times[int(rank)] for rank, blocks in self.ranks.items() if blocks >= LASTING}
        if not debounce(self.active, "straggler", bool(lasting), REARM):
            return []
        symptoms = []
        for rank in sorted(lasting, key=lambda rank: -lasting[rank])[:4]:
            waited_s = lasting[rank] - usual
            host = f" ({self.hosts[rank]})" if rank < len(self.hosts) else ""
            share = min(1.0, waited_s / max(step_s, 1e-9))
            delay = f"others wait {1000 * waited_s:.3g} ms of a {1000 * step_s:.3g} ms step for it, {100 * share:.0f} %"
            symptoms.append(f"rank {rank}{host} is slow: {delay}")
        return make_alarm(
            "straggler", block.step, "warning", "; ".join(symptoms), 0.9, ranks=sorted(lasting), usual_s=usual,
            own_s=[lasting[rank] for rank in sorted(lasting)], step_s=step_s,
        )  # fmt: skip


# NVML's reasons for a clock below its highest: bits of `gpu_throttle`. Other bits are settings, or an idle GPU.
POWER_CAP = 0x4
HEAT_OR_SUPPLY = {0x8: "a hardware slowdown", 0x20: "its temperature (software)", 0x40: "its temperature (hardware)",
                  0x80: "a power brake of the supply"}  # fmt: skip
THROTTLED_S = 60.0  # without a break
LOST = 0.05  # of the clock that counts
CAPPED_READINGS = 60  # under the power limit, whose median is a clock that the run holds
PEERS = 3  # ranks whose median is one at once


@dataclass
class ThrottleDetector:
    """GPUs whose SM clock power or heat hold down. Heat is measured against the highest clock. A power limit holds
    every busy large GPU below that, so it is measured against the clock that this run's GPUs hold under it."""

    hosts: list[str]  # of the ranks
    since_s: dict[int, float] = field(default_factory=dict)  # rank -> when it was first seen throttled, without a break
    usual_mhz: float = 0.0  # the highest clock that was held under the power limit
    capped_mhz: list[float] = field(default_factory=list)  # of the median rank, since usual_mhz was last compared
    active: dict[str, int] = field(default_factory=dict)

    def readings(
        self, step: int, now_s: float, reasons: Sequence[float | None], clock_mhz: Sequence[float | None],
        max_mhz: Sequence[float | None],
    ) -> list[Alarm]:  # fmt: skip
        """From one reading of each rank; None is unknown."""
        capped = [
            clock for bits, clock in zip(reasons, clock_mhz, strict=True)
            if bits is not None and clock and int(bits) & POWER_CAP
        ]  # fmt: skip
        self._learn_usual(capped)
        lost: dict[int, tuple[float, str]] = {}
        for rank, (bits, clock, highest) in enumerate(zip(reasons, clock_mhz, max_mhz, strict=True)):
            heat = next((words for bit, words in HEAT_OR_SUPPLY.items() if int(bits or 0) & bit), "")
            reference = highest if heat else self.usual_mhz if int(bits or 0) & POWER_CAP else None
            if clock and reference and clock < (1 - LOST) * reference:
                words = f"{clock:,.0f} MHz instead of {reference:,.0f}, held by {heat or 'its power limit'}"
                lost[rank] = 1 - clock / reference, words
        self.since_s = {rank: self.since_s.get(rank, now_s) for rank in lost}
        lasting = [rank for rank in lost if now_s - self.since_s[rank] >= THROTTLED_S]
        if not debounce(self.active, "throttled", bool(lasting), REARM):
            return []
        worst = max(lasting, key=lambda rank: lost[rank][0])
        where = f"rank {worst} ({self.hosts[worst]}): " if len(self.hosts) > 1 else ""
        share, words = lost[worst]
        return make_alarm(
            "throttled", step, "warning", f"throttled, -{share:.0%}: {where}the SM clock is {words}", 0.9,
            lost={str(rank): round(lost[rank][0], 4) for rank in lasting}, clock_mhz=clock_mhz[worst],
        )  # fmt: skip

    def _learn_usual(self, capped: Sequence[float]) -> None:
        if not capped:
            return
        middle = median(capped)
        self.capped_mhz.append(middle)
        if len(capped) >= PEERS:
            self.usual_mhz = max(self.usual_mhz, middle)
        if len(self.capped_mhz) == CAPPED_READINGS:
            self.usual_mhz = max(self.usual_mhz, median(self.capped_mhz))
            self.capped_mhz = []


@dataclass
class MemoryDetector:
    """Memory that grows on a line towards the limit: Theil-Sen, only if nearly every pair of points rises and the line
    need not be extrapolated far."""

    guard: GuardSpec
    limit_bytes: int | None
    total_steps: int
    levels: list[float] = field(default_factory=list)
    blocks: int = 0
    active: dict[str, int] = field(default_factory=dict)

    def block(self, block: StepBlock) -> list[Alarm]:
        if self.limit_bytes is None:
            return []
        now = median([record["memory_bytes"] for record in block.attempts])
        self.levels = [*self.levels, now][-4 * POINTS :]
        self.blocks += 1
        if self.blocks % LASTING:
            return []
        free = self.limit_bytes - now
        # Over 256 and over 1,024 steps.
        slope = max((self._line(thin, free) for thin in (1, 4) if len(self.levels) >= thin * POINTS), default=0.0)
        end = block.step + free / slope if slope > 0 else float("inf")
        if not debounce(self.active, "memory_growth", end < self.total_steps, LASTING):
            return []
        symptom = f"memory grows by {slope / 2**20:.3g} MiB a step and will reach its limit near step {end:.0f}"
        return make_alarm(
            "memory_growth", block.step, "warning", symptom, 0.9, bytes_per_step=slope, memory_bytes=now,
            limit_bytes=self.limit_bytes, predicted_step=int(end),
        )  # fmt: skip

    def _line(self, thin: int, free: float) -> float:
        """Bytes per step along every `thin`-th point; 0 if it is no line or does not reach the limit soon."""
        points, half = self.levels[::-thin][POINTS - 1 :: -1], POINTS // 2
        (_, tau), (older, _), (newer, _) = map(theil_sen, (points, points[:half], points[half:]))
        # Growth that slows by a factor per half sums to a geometric series; other growth does not end.
        slowing = newer / older if older > newer > 0 else 1.0
        halves = min(2 * AHEAD, slowing / (1 - slowing)) if slowing < 1 else 2 * AHEAD
        return newer / thin / BLOCK if tau > 0.8 and free < halves * half * newer else 0.0


@dataclass
class SettingsDetector:
    """The learning rate against its plan, the loss scale against its past, the wall against the monotonic clock."""

    guard: GuardSpec
    lr: float | None = None
    scales: list[float] = field(default_factory=list)  # of the last steps
    offset_s: float | None = None  # wall clock minus monotonic clock
    active: dict[str, int] = field(default_factory=dict)

    def step(self, record: Record, clocks: tuple[float, float] | None) -> list[Alarm]:
        alarms = self._learning_rate(record)
        if "loss_scale" in record:
            alarms += self._loss_scale(record)
        if clocks is not None:
            alarms += self._clock(record["step"], *clocks)
        return alarms

    def _learning_rate(self, record: Record) -> list[Alarm]:
        """Without a plan only a jump upwards is suspicious: schedules may fall in steps."""
        lr, planned, jump = record["lr"], record.get("lr_planned"), self.guard.detect.lr_jump
        against = self.lr if planned is None else planned
        self.lr = lr
        large = against is not None and lr > jump * against > 0
        wrong = large if planned is None else abs(lr - planned) > 1e-6 * planned
        if not debounce(self.active, "learning_rate", wrong, BLOCK):
            return []
        severity: Severity = "rollback" if large and planned is not None else "warning"
        symptom = f"the learning rate is {lr:.4g}, {'one step before' if planned is None else 'planned'} {against:.4g}"
        return make_alarm("learning_rate", record["step"], severity, symptom, 0.9, lr=lr, against=against)

    def _loss_scale(self, record: Record) -> list[Alarm]:
        """Scalers start high and settle within some dozens of steps; a later fall by 256 is trouble."""
        scale, settled = record["loss_scale"], self.guard.detect.warmup
        self.scales.append(scale)
        del self.scales[:-settled]
        collapsed = scale < self.guard.detect.loss_scale_least and len(self.scales) >= settled // 2
        usual = median(self.scales) if scale < self.scales[0] else scale
        bad = collapsed or (len(self.scales) == settled and scale * 256 <= usual)
        if not debounce(self.active, "loss_scale", bad, settled):
            return []
        symptom = f"the loss scale fell to {scale:g}, recently {usual:g}"
        severity: Severity = "rollback" if collapsed else "warning"
        return make_alarm("loss_scale", record["step"], severity, symptom, 0.95, loss_scale=scale, usual=usual)

    def _clock(self, step: int, wall_s: float, monotonic_s: float) -> list[Alarm]:
        before, self.offset_s = self.offset_s, wall_s - monotonic_s
        jump = 0.0 if before is None else self.offset_s - before
        if abs(jump) <= self.guard.detect.clock_jump:
            return []
        return make_alarm("clock_jump", step, "note", f"the wall clock jumped by {jump:+.1f} s", 1.0, seconds=jump)
