"""The two tables of the project that dpex began as: trainings that must end alike, and what people did by hand."""
