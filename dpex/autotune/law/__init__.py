"""One law for the number of workers and the prefetch: what is measured, the model of it, and what follows. PURE."""

from dpex.autotune.law.law import Law, start

__all__ = ["Law", "start"]
