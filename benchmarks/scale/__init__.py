"""How dpex behaves as its work grows: workers, nodes, links, trainings, deaths, large data, and a simulation beyond."""
