import pytest

from specmortem.detect.hooks import hooked


class Counter:
    def __init__(self):
        self.total = 0

    def add(self, n, times=1):
        self.total += n * times
        return self.total


def test_a_hook_gets_the_original_and_the_arguments_and_is_out_again_after_the_block():
    original = Counter.add
    counter = Counter()
    with hooked(Counter, add=lambda add, self, n, **named: -add(self, n + 1, **named)):
        assert counter.add(1, times=2) == -4
    assert Counter.add is original and counter.add(1) == 5


def test_hooks_are_out_again_after_an_error_and_stack():
    original, counter = Counter.add, Counter()
    double = lambda add, self, n: 2 * add(self, n)  # noqa: E731
    with pytest.raises(KeyError), hooked(Counter, add=double), hooked(Counter, add=double):
        assert counter.add(1) == 4
        raise KeyError
    assert Counter.add is original


def test_an_unknown_name_replaces_nothing():
    original = Counter.add
    with pytest.raises(AttributeError), hooked(Counter, add=lambda add: None, subtract=lambda: None):
        pass
    assert Counter.add is original
