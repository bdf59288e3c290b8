"""The watchdog, on a clock that the test moves; and once with real threads."""

import threading

import pytest

from bessemer.guard.watchdog import Watchdog
from bessemer.spec.guard import HangSpec


class Hands:
    """A clock whose hands the test moves."""

    def __init__(self):
        self.now = 1000.0
        self.hangs = []
        spec = HangSpec(factor=5.0, least="60s", first="30 min")
        self.pauses, self.signs, self.silent = [], [], False
        self.dog = Watchdog(
            spec, self.hangs.append, clock=lambda: self.now, poll_s=1.0,
            on_pause=lambda step, seconds: self.pauses.append((step, seconds)), peers=self,
        )  # fmt: skip

    def write_heartbeat(self, beat):
        self.signs.append(beat)

    def frozen(self, beat):
        return self.silent

    def wait(self, seconds):
        """As the thread does it: a look every second."""
        for _ in range(int(seconds)):
            self.now += 1.0
            self.dog.check()

    def steps(self, count, seconds, start=0):
        for step in range(start, start + count):
            self.wait(seconds)
            self.dog.beat(step)


@pytest.fixture
def hands():
    return Hands()


def test_the_first_step_has_a_limit_of_its_own(hands):
    hands.wait(1799)
    assert hands.hangs == []
    hands.wait(3)
    assert [hang.limit_s for hang in hands.hangs] == [1800.0]
    assert hands.hangs[0].step == -1


def test_the_limit_is_learnt_from_the_longest_recent_step(hands):
    hands.steps(1, 500)  # the first step, which compiles, is no measure
    hands.steps(4, 20, start=1)
    assert hands.dog.limit_s == 100.0
    hands.wait(99)
    assert hands.hangs == []
    hands.wait(3)
    assert len(hands.hangs) == 1 and hands.hangs[0].step == 4 and hands.hangs[0].waited_s > 100
    assert "after step 4" in hands.hangs[0].finding().symptom


def test_short_steps_have_the_floor(hands):
    hands.steps(20, 1)
    assert hands.dog.limit_s == 60.0


def test_a_hang_is_said_once_and_the_next_one_again(hands):
    hands.steps(5, 1)
    hands.wait(500)
    assert len(hands.hangs) == 1
    hands.dog.beat(5)
    hands.dog.beat(6)
    hands.wait(3000)
    assert [hang.step for hang in hands.hangs] == [4, 6]


def test_an_evaluation_may_take_long_and_is_not_learnt(hands):
    hands.steps(5, 1)
    hands.dog.beat(5, long=True)
    hands.wait(1500)
    assert hands.hangs == []
    hands.dog.beat(6)
    assert hands.dog.limit_s == 60.0


def test_a_suspended_machine_is_no_hang(hands):
    """The steady clock may run on or stand still while the process does not: a gap between looks is not waiting."""
    hands.steps(5, 1)
    hands.now += 8 * 3600
    hands.dog.check()
    hands.wait(50)
    assert hands.hangs == []
    assert hands.pauses == [(4, 8 * 3600)]
    hands.dog.beat(5)
    assert hands.dog.limit_s < 300
    hands.now -= 7200  # no steady clock does this; nothing breaks if one did
    hands.dog.check()
    hands.dog.beat(6)
    assert hands.hangs == []


def test_a_step_that_never_ends_is_said_with_the_stacks_of_all_threads():
    said, found = threading.Event(), []

    def on_hang(hang):
        found.append(hang)
        said.set()

    def stuck_in_a_collective():
        assert said.wait(60)

    with Watchdog(HangSpec(factor=2.0, least="0.02s", first="0.05s"), on_hang, poll_s=0.01):
        stuck_in_a_collective()
    assert "stuck_in_a_collective" in found[0].stacks and len(found) == 1


def test_it_ends_with_the_run():
    with Watchdog(HangSpec(), lambda hang: None) as dog:
        dog.beat(0)
    assert not any(thread.name == "watchdog" and thread.is_alive() for thread in threading.enumerate())


def test_one_hang_does_not_raise_the_limit_and_two_in_a_row_are_the_new_pace(hands):
    hands.steps(5, 2)
    hands.steps(1, 90, start=5)  # hung: told, and not learnt from
    assert len(hands.hangs) == 1 and hands.dog.limit_s == 60
    hands.steps(3, 2, start=6)
    hands.steps(2, 90, start=9)
    assert len(hands.hangs) == 3 and hands.dog.limit_s == 450
    hands.steps(3, 90, start=11)
    assert len(hands.hangs) == 3


def test_a_process_that_is_frozen_in_a_save_is_found_early(hands):
    hands.steps(5, 1)
    hands.dog.beat(5, long=True)
    hands.silent = True
    hands.wait(60)
    assert hands.hangs == [] and hands.signs == []
    hands.wait(3)
    assert hands.signs == [6]
    hands.wait(4)
    assert [(hang.step, hang.limit_s) for hang in hands.hangs] == [(5, 65.0)]
    hands.wait(1000)
    assert len(hands.hangs) == 1 and hands.signs == [6]


def test_a_long_save_of_processes_that_live_is_no_hang(hands):
    hands.steps(5, 100)  # their signs come at each step, and nobody looks for them
    assert hands.signs == [0, 1, 2, 3, 4]
    hands.dog.beat(5, long=True)
    hands.wait(154)
    hands.silent = True  # only now: they have been looked for at 1.5 times the longest step
    hands.wait(1000)
    assert len(hands.hangs) == 1 and hands.hangs[0].waited_s > 150


def test_a_stopped_process_says_for_how_long_it_did_not_run(hands):
    hands.steps(5, 1)
    hands.now += 40
    hands.dog.beat(5)  # the loop may be the first to run again
    hands.dog.check()
    assert hands.pauses == []
    hands.now += 90
    hands.dog.beat(6)
    hands.dog.check()
    assert hands.pauses == [(6, 90.0)] and hands.hangs == []
