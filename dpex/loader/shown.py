"""The text and HTML of a loader and of its decisions, for terminals and notebooks. Nothing here makes a loader wait."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from dpex.autotune.law.wording import described
from dpex.autotune.types import Decision
from dpex.measure.readable import duration, percent

if TYPE_CHECKING:
    from dpex.dataloader import DpexDataLoader
    from dpex.stats import LoaderStats

_DECISIONS = 3
"""The latest that a notebook shows; ``loader.decisions`` has all of them."""
_STYLE = """
.dpex-loader { max-width: 46rem; line-height: 1.45; } .dpex-loader p { margin: .2rem 0; }
.dpex-loader .faint { opacity: .65; font-size: .9em; }
"""


def loader_html(loader: DpexDataLoader[Any]) -> str:
    """Return the HTML of a loader for a notebook: settings, state, and the last decisions."""
    title, stats = loader.name or type(loader.dataset).__name__, loader.stats()
    parts = [
        f"<style>{_STYLE}</style>",
        f"<p><strong>{escape(type(loader).__name__)} {escape(title)}</strong></p>",
        f'<p class="faint">{escape(", ".join(_settings(loader)))}</p>',
        f"<p>{escape(_state(loader, stats))}</p>",
        *_latest(loader.decisions),
    ]
    if loader.metrics_url is not None:
        parts.append(f'<p><a href="{escape(loader.metrics_url)}">live page</a></p>')
    return '<div class="dpex-loader">\n' + "\n".join(part for part in parts if part) + "\n</div>"


def loader_text(loader: DpexDataLoader[Any]) -> str:
    """Return one line for a terminal; "" for a loader whose constructor failed."""
    try:
        name = f" {loader.name}" if loader.name else ""
        return f"<{type(loader).__name__}{name}: {', '.join(_settings(loader))}. {_state(loader, loader.stats())}>"
    except AttributeError:
        return ""


def _settings(loader: DpexDataLoader[Any]) -> Iterator[str]:
    yield type(loader.dataset).__name__
    if loader.batch_size is not None:
        yield f"batch size {loader.batch_size}"
    yield 'num_workers="auto"' if loader._is_auto else f"num_workers={loader.num_workers}"


def _state(loader: DpexDataLoader[Any], stats: LoaderStats) -> str:
    if not stats.batches:
        return "No batch was delivered yet."
    has_ended = loader._runtime.last_stats.has_ended  # its workers, too, which the figures kept of it still count
    workers = [f"{pool.running} {name}" for name, pool in stats.pools.items() if pool.running and not has_ended]
    wait = f", wait {percent(stats.wait_ratio)}" if stats.wait_s + stats.work_s else ""
    running = f"; workers that run: {' + '.join(workers)}" if workers else "; no worker runs now"
    return f"Epoch {stats.epoch + 1}: {stats.batches:,} batches{wait}{running}."


def _latest(decisions: Sequence[Decision]) -> Iterator[str]:
    first = max(0, len(decisions) - _DECISIONS)
    for number, one in enumerate(decisions[first:], first + 1):
        yield f'<p><span class="faint">{number}, after {duration(one.at)}:</span> {escape(one.text)}</p>'


class DecisionList(list[Decision]):
    """A list of decisions whose ``repr`` is a line for each."""

    def __repr__(self) -> str:
        lines = [f"{number}. {described(one)}" for number, one in enumerate(self, 1)]
        return "\n".join(lines) or "no decisions"

    def _repr_html_(self) -> str:
        rows = "".join(f'<li title="{escape(one.text)}">{escape(described(one))}</li>' for one in self)
        return f"<ol>{rows}</ol>" if rows else "<p>no decisions</p>"
