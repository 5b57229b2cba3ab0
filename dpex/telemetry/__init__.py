"""What dpex measures, named and exported: the catalogue of metrics, the collector, the endpoint and how it is found."""
