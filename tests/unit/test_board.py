"""Which process takes a connection."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tokenwire.frontend.board import STALE_S, Board, Seat, Turn

NOW = 1_000.0


@pytest.fixture
def board() -> Iterator[Board]:
    """A board for three processes."""
    made = Board.create(3)
    yield made
    made.close()


def sit(board: Board, process: int, connections: int, *, ready: bool = True) -> None:
    """Take a seat."""
    board.sit(process, NOW, ready=ready)
    board.count(process, connections)


def test_alone_it_takes_all(board: Board) -> None:
    """Also before it can serve: somebody has to say so."""
    assert board.turn(0, NOW) is Turn.NOW
    sit(board, 0, 7, ready=False)
    assert board.turn(0, NOW) is Turn.NOW
    assert not board.is_ready(NOW)


def test_whoever_has_fewer_goes_first(board: Board) -> None:
    """With as many as the least of the others, it is a process's turn."""
    sit(board, 0, 3)
    sit(board, 1, 2)
    sit(board, 2, 2)
    assert [board.turn(n, NOW) for n in range(3)] == [Turn.YIELD, Turn.NOW, Turn.NOW]


def test_among_many_one_more_is_nothing(board: Board) -> None:
    """No connection waits for the sake of a sixteenth."""
    sit(board, 0, 106)
    sit(board, 1, 100)
    assert board.turn(0, NOW) is Turn.NOW
    board.count(0, 107)
    assert board.turn(0, NOW) is Turn.YIELD


def test_who_cannot_serve_stands_by_while_another_can(board: Board) -> None:
    """A process that drains, or that has no worker yet, would answer 503."""
    sit(board, 0, 0, ready=False)
    sit(board, 1, 9)
    assert board.turn(0, NOW) is Turn.STAND_BY
    assert board.turn(1, NOW) is Turn.NOW
    assert board.is_ready(NOW)


def test_a_process_that_stands_still_is_waited_for_no_longer(board: Board) -> None:
    """Its seat is stale; that of an ended one is cleared at once."""
    sit(board, 0, 5)
    sit(board, 1, 0)
    later = NOW + STALE_S + 0.1
    board.sit(0, later, ready=True)
    assert board.turn(0, later) is Turn.NOW
    assert board.seats(later) == [Seat(0, os.getpid(), ready=True, connections=5)]
    assert len(board.seats(NOW)) == 2
    board.leave(1)
    assert len(board.seats(NOW)) == 1


def test_processes_see_the_same_board(board: Board) -> None:
    """Whoever has the descriptor has the memory."""
    other = Board(os.dup(board.fd), 3)
    sit(other, 2, 4)
    assert board.seats(NOW) == [Seat(2, os.getpid(), ready=True, connections=4)]
    other.close()
