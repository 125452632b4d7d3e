"""Calls from other threads that must happen on the agent's loop."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from zerostall.errors import AgentError

Result = TypeVar("Result")
Post = Callable[[Callable[[], None]], None]

ANSWER_SECONDS = 20.0


def on_loop(post: Post, call: Callable[[], Result]) -> Result:
    """Have the loop's thread call, and wait for the result or raise what it raised.

    Raises:
        AgentError: the loop has not come to it for `ANSWER_SECONDS`; then it never will.
    """
    future: Future[Result] = Future()

    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - it belongs to whoever asked
            future.set_exception(error)

    post(run)
    try:
        return future.result(ANSWER_SECONDS)
    except TimeoutError:
        if future.cancel():
            raise AgentError(f"the agent's loop has been busy for {ANSWER_SECONDS:.0f} s") from None
        return future.result()
