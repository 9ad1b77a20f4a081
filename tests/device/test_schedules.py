from __future__ import annotations

from itertools import combinations, permutations

import pytest
from hypothesis import HealthCheck, assume, event, given, settings

from specmortem import device
from specmortem.device import Chosen, Timed, enumerate_schedules
from specmortem.errors import BadInputError

from .behaviour import add, assign, buffer, double, ints
from .programs import interpret, ordered_programs, programs, races, unreduced_outcomes

LIMIT = 1500
SLOW = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)


def outcomes(program, limit: int = LIMIT) -> set:
    """All outcomes, or no example where there are too many interleavings."""
    try:
        return {outcome for _, outcome in enumerate_schedules(program, limit=limit)}
    except BadInputError:
        assume(False)


@SLOW
@given(ordered_programs())
def test_a_program_whose_conflicts_are_ordered_has_one_outcome(instructions):
    program = interpret(instructions)
    assume(not races(program))
    assert len(outcomes(program)) == 1


@SLOW
@given(programs())
def test_two_outcomes_mean_a_race_or_a_query(instructions):
    program = interpret(instructions)
    several = len(outcomes(program)) > 1
    event(f"several outcomes: {several}")
    assert not several or races(program) or ("query",) in instructions


@SLOW
@given(programs())
def test_every_other_schedule_gives_an_enumerated_outcome(instructions):
    program = interpret(instructions)
    enumerated = outcomes(program)
    for schedule in ("lazy", "immediate", "timed"):
        assert program(device.open("sim", schedule=schedule)) in enumerated
    for seed in range(200):
        assert program(device.open("sim", schedule="random", seed=seed)) in enumerated


@SLOW
@given(programs(max_size=7))
def test_the_outcomes_are_those_of_an_enumeration_without_reduction(instructions):
    program = interpret(instructions)
    expected = unreduced_outcomes(program, limit=3000)
    assume(expected is not None)
    assert outcomes(program) == expected


@SLOW
@given(programs())
def test_recorded_choices_give_the_outcome_again(instructions):
    program = interpret(instructions)
    try:
        explored = list(enumerate_schedules(program, limit=LIMIT))
    except BadInputError:
        assume(False)
    for choices, outcome in explored[:20]:
        assert program(device.open("sim", schedule=Chosen(choices))) == outcome
    assert len({choices for choices, _ in explored}) == len(explored)


def test_a_refilled_staging_buffer_has_all_its_outcomes():
    def program(dev):
        host, tensor, seen = buffer(dev, 0), ints(dev, 0), [ints(dev, 0), ints(dev, 0), ints(dev, 0)]
        for plan, snapshot in enumerate(seen, start=1):
            host[0] = plan
            dev.copy_async(tensor, host)
            dev.copy_async(snapshot, tensor)
        dev.synchronize()
        return tuple(int(snapshot) for snapshot in seen)

    found = [outcome for _, outcome in enumerate_schedules(program)]
    assert sorted(found) == [(1, 2, 3), (1, 3, 3), (2, 2, 3), (2, 3, 3), (3, 3, 3)]


def test_a_copy_up_can_land_at_every_host_access():
    def program(dev):
        counts, host = ints(dev, 4, 2, 3, 1), buffer(dev, 0, 0, 0, 0)
        dev.copy_async(host, counts)
        host[0] = 1
        low, high = host[0], host[3]
        host[0], host[3] = high, low
        dev.synchronize()
        return tuple(host[:].tolist())

    found = {outcome for _, outcome in enumerate_schedules(program)}
    assert found == {(1, 2, 3, 1), (1, 2, 3, 4), (0, 2, 3, 1), (0, 2, 3, 4), (4, 2, 3, 1)} & found
    assert {(1, 2, 3, 1), (1, 2, 3, 4), (4, 2, 3, 1)} <= found


def test_two_streams_on_one_tensor_interleave_in_every_way():
    def program(dev):
        tensor = ints(dev, 1)
        for name in ("left", "right"):
            dev.launch(double, tensor, stream=dev.stream(name))
            dev.launch(add, tensor, 1 if name == "left" else 10, stream=dev.stream(name))
        dev.synchronize()
        return int(tensor)

    def run(order):
        value = 1
        for step in order:
            value = value * 2 if step == "double" else value + step
        return value

    orders = set()
    for left in combinations(range(4), 2):
        streams = {True: iter(["double", 1]), False: iter(["double", 10])}
        orders.add(tuple(next(streams[place in left]) for place in range(4)))
    assert {outcome for _, outcome in enumerate_schedules(program)} == {run(order) for order in orders}


def test_streams_on_different_tensors_are_not_interleaved():
    def program(dev):
        tensors = [ints(dev, 1) for _ in range(3)]
        for index, tensor in enumerate(tensors):
            for _ in range(4):
                dev.launch(double, tensor, stream=dev.stream(str(index)))
        dev.synchronize()
        return [int(tensor) for tensor in tensors]

    explored = enumerate_schedules(program)
    assert [outcome for _, outcome in explored] == [[16, 16, 16]]
    assert explored.explored == 1


def test_streams_that_only_read_one_tensor_are_not_interleaved():
    def program(dev):
        source, targets = ints(dev, 1), [ints(dev, 0), ints(dev, 0)]
        for index, target in enumerate(targets):
            dev.copy_async(target, source, dev.stream(str(index)))
        dev.synchronize()

    assert len(list(enumerate_schedules(program))) == 1


def test_declared_reads_and_writes_decide_what_conflicts():
    def program(dev, reads):
        tensor, other = ints(dev, 1), dev.stream("other")
        dev.launch(lambda t: None, tensor, reads=[tensor] if reads else [], writes=[])
        dev.launch(assign, tensor, 2, stream=other)
        dev.synchronize()

    assert len(list(enumerate_schedules(lambda dev: program(dev, True)))) == 2
    assert len(list(enumerate_schedules(lambda dev: program(dev, False)))) == 1


def test_views_conflict_where_they_overlap():
    def program(dev, start):
        tensor, other = ints(dev, 0, 0, 0, 0), dev.stream("other")
        dev.launch(assign, tensor[:2], 1)
        dev.launch(assign, tensor[start:], 2, stream=other)
        dev.synchronize()
        return tuple(tensor.tolist())

    assert {outcome for _, outcome in enumerate_schedules(lambda dev: program(dev, 1))} == {
        (1, 1, 2, 2),
        (1, 2, 2, 2),
    }
    assert len(list(enumerate_schedules(lambda dev: program(dev, 2)))) == 1


def test_host_accesses_of_another_part_of_a_buffer_do_not_branch():
    def program(dev):
        tensor, host = ints(dev, 7, 7), buffer(dev, 0, 0, 0, 0)
        dev.copy_async(host.rows(2, 4), tensor)
        host[0], host[:2], host[1:2] = 1, 2, 3
        dev.synchronize()
        return host[:].tolist()

    assert [outcome for _, outcome in enumerate_schedules(program)] == [[2, 3, 7, 7]]


def test_a_query_answers_both_ways():
    def program(dev):
        mark = dev.event()
        dev.launch(double, ints(dev, 1))
        mark.record()
        return mark.query(), mark.query()

    assert {outcome for _, outcome in enumerate_schedules(program)} == {
        (True, True),
        (False, True),
        (False, False),
    }


def test_events_across_streams_leave_one_order():
    def program(dev):
        tensor, mark, other = ints(dev, 1), dev.event(), dev.stream("other")
        dev.launch(add, tensor, 1)
        mark.record()
        other.wait(mark)
        dev.launch(double, tensor, stream=other)
        dev.synchronize()
        return int(tensor)

    assert [outcome for _, outcome in enumerate_schedules(program)] == [4]


def test_other_streams_run_between_the_operations_of_a_replay():
    def program(dev):
        tensor, other = ints(dev, 1), dev.stream("other")
        with dev.capture() as graph:
            dev.launch(double, tensor)
            dev.launch(double, tensor)
        graph.replay()
        dev.launch(add, tensor, 1, stream=other)
        dev.synchronize()
        return int(tensor)

    assert {outcome for _, outcome in enumerate_schedules(program)} == {5, 6, 8}


def test_replays_of_one_graph_in_two_streams_never_interleave():
    def program(dev):
        tensor = ints(dev, 0)
        with dev.capture() as graph:
            dev.launch(double, tensor)
            dev.launch(add, tensor, 1)
        graph.replay()
        graph.replay(dev.stream("other"))
        dev.synchronize()
        return int(tensor)

    assert [outcome for _, outcome in enumerate_schedules(program)] == [3]


def test_three_writers_come_in_every_order():
    def program(dev):
        tensor = ints(dev, 0)
        for digit in (1, 2, 3):
            dev.launch(lambda t, d: t.mul_(10).add_(d), tensor, digit, stream=dev.stream(str(digit)))
        dev.synchronize()
        return int(tensor)

    expected = {int("".join(map(str, order))) for order in permutations((1, 2, 3))}
    assert sorted(outcome for _, outcome in enumerate_schedules(program)) == sorted(expected)


def test_what_a_program_raises_is_its_outcome():
    def program(dev):
        tensor, host = ints(dev, 5), buffer(dev, 0)
        dev.copy_async(host, tensor)
        return 10 // host[0]

    found = [outcome for _, outcome in enumerate_schedules(program)]
    assert len(found) == 2
    assert isinstance(found[0], ZeroDivisionError) or found[1] == 2


def test_too_many_interleavings_are_an_error():
    def program(dev):
        tensor = ints(dev, 0)
        for index in range(10):
            dev.launch(double, tensor, stream=dev.stream(str(index)))
        dev.synchronize()

    explored = enumerate_schedules(program, limit=50)
    with pytest.raises(BadInputError, match="more than 50 interleavings: raise limit="):
        list(explored)
    assert explored.explored == 50


def test_a_limit_equal_to_the_count_is_enough():
    def program(dev):
        mark = dev.event()
        mark.record()
        return mark.query()

    assert sorted(outcome for _, outcome in enumerate_schedules(program, limit=2)) == [False, True]


def test_a_limit_below_one_is_refused():
    with pytest.raises(BadInputError, match="limit 0: allow at least one interleaving"):
        enumerate_schedules(lambda dev: None, limit=0)


def test_a_program_that_polls_for_ever_is_an_error():
    def program(dev):
        mark = dev.event("mark")
        mark.record()
        while not mark.query():
            dev.host_time(1)

    with pytest.raises(device.ScheduleError, match="event 'mark' was asked"):
        list(enumerate_schedules(program))


def test_a_program_that_does_more_in_its_next_run_is_an_error():
    runs = []

    def program(dev):
        runs.append(None)
        tensor = ints(dev, 0)
        for index in range(1 + len(runs)):
            dev.launch(double, tensor, stream=dev.stream(str(index)))
        dev.synchronize()

    with pytest.raises(BadInputError, match="the program went another way at branch 0"):
        list(enumerate_schedules(program))


def test_a_program_that_does_less_in_its_next_run_is_an_error():
    runs = []

    def program(dev):
        runs.append(None)
        mark = dev.event()
        mark.record()
        return mark.query() if len(runs) == 1 else None

    with pytest.raises(BadInputError, match="the program went another way at branch 0"):
        list(enumerate_schedules(program))


@pytest.mark.parametrize("name", ["enumerate", "eager"])
def test_other_schedule_names_are_refused(name):
    with pytest.raises(BadInputError, match=f"schedule '{name}'"):
        device.open("sim", schedule=name)


def test_a_schedule_serves_one_device():
    schedule = Timed()
    device.open("sim", schedule=schedule)
    with pytest.raises(BadInputError, match="this Timed schedule already serves a device"):
        device.open("sim", schedule=schedule)


def test_random_schedules_repeat_by_seed():
    def order(seed):
        dev = device.open("sim", schedule="random", seed=seed)
        for index in range(6):
            dev.launch(double, ints(dev, 1), stream=dev.stream(str(index)))
        dev.synchronize()
        return [record.stream for record in dev.trace if record.by == "queue"]

    assert order(3) == order(3)
    assert len({tuple(order(seed)) for seed in range(10)}) > 1


def test_immediate_runs_work_before_the_enqueue_returns():
    dev = device.open("sim", schedule="immediate")
    tensor = ints(dev, 1)
    dev.launch(double, tensor)
    assert int(tensor) == 2


class TestTimed:
    def runs(self, dev):
        return [(r.name, r.start_us, r.end_us) for r in dev.trace if r.by == "queue" and r.what != "record"]

    def test_launches_overlap_with_the_host(self):
        dev = device.open("sim", schedule=Timed(launch_us=5))
        tensor = ints(dev, 1)
        dev.launch(double, tensor, name="a", duration_us=100)
        dev.launch(double, tensor, name="b", duration_us=10)
        dev.synchronize()
        assert self.runs(dev) == [("a", 5, 105), ("b", 105, 115)]
        assert [r.start_us for r in dev.trace if r.what == "synchronize"] == [115]

    def test_a_replay_costs_one_launch(self):
        dev = device.open("sim", schedule=Timed(launch_us=5))
        tensor = ints(dev, 1)
        with dev.capture() as graph:
            for name in "abc":
                dev.launch(double, tensor, name=name, duration_us=1)
        graph.replay()
        dev.synchronize()
        assert [run for run in self.runs(dev) if run[0] in "abc"] == [("a", 5, 6), ("b", 6, 7), ("c", 7, 8)]

    def test_a_wait_delays_the_start(self):
        dev = device.open("sim", schedule=Timed(launch_us=5))
        mark, other = dev.event(), dev.stream("other")
        dev.spin(50)
        mark.record()
        other.wait(mark)
        dev.launch(double, ints(dev, 1), name="late", stream=other)
        dev.synchronize()
        assert ("late", 55, 58) in self.runs(dev)

    @pytest.mark.parametrize(("meanwhile_us", "read_us"), [(0, 1), (40, 0)])
    def test_host_time_decides_what_a_refilled_buffer_delivers(self, meanwhile_us, read_us):
        dev = device.open("sim", schedule=Timed(launch_us=5))
        tensor, host = ints(dev, 0), buffer(dev, 1)
        dev.spin(30)
        dev.copy_async(tensor, host, duration_us=2)
        dev.host_time(meanwhile_us)
        host[0] = 2
        dev.synchronize()
        assert int(tensor) == 1 + read_us

    def test_polling_takes_time(self):
        dev = device.open("sim", schedule=Timed(launch_us=5, query_us=1))
        mark, polls = dev.event(), 1
        dev.spin(20)
        mark.record()
        while not mark.query():
            polls += 1
        assert polls == 20
