"""Ray's own errors: what is said of each."""

from typing import Any

from packages import need

from dpex.pools.ray.guardians import LONGEST_TEXT, reason_of

need("ray", "needs Ray: pip install 'dpex[ray]'")


def died(message: str = "something happened", **fields: Any) -> Any:
    """Return the error that Ray makes of what its control service says about a dead actor."""
    from ray import exceptions
    from ray._raylet import ActorID
    from ray.core.generated.common_pb2 import ActorDiedErrorContext

    about: Any = {"class_name": "DpexWorker", "actor_id": b"\1" * ActorID.size(), "pid": 7, **fields}
    return exceptions.ActorDiedError(ActorDiedErrorContext(error_message=message, **about))


def raised(cause: Exception) -> Any:
    """Return the error that Ray makes of an error in a task."""
    from ray import exceptions

    trace = f'Traceback (most recent call last):\n  File "a.py", line 1, in work\n{type(cause).__name__}: {cause}'
    error = exceptions.RayTaskError("work", trace, cause, proctitle="ray::work", pid=7, ip="127.0.0.1")
    return error.as_instanceof_cause()


def test_rays_reason_of_a_death_omits_the_actors_fields() -> None:
    error = died("its process ended with\tcode 9", name="dpex-worker-1", node_ip_address="127.0.0.1")
    assert "\n\tip: 127.0.0.1\n" in str(error)
    base = type(error).BASE_ERROR_MSG
    assert reason_of(error) == f"{base} its process ended with code 9 [ActorDiedError]"


def test_an_error_raised_in_the_actor_has_no_traceback_in_text() -> None:
    error = raised(OSError("no space left"))
    assert "File" in str(error)
    assert reason_of(error) == "no space left [OSError]"


def test_long_messages_are_cut_between_words() -> None:
    told = reason_of(died("word " * LONGEST_TEXT))
    assert told.endswith("word … [ActorDiedError]")
    assert len(told) <= LONGEST_TEXT + len(" [ActorDiedError]")
