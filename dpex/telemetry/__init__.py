"""The exported metrics: catalogue, collector, endpoint with the live page, and announcements for Prometheus."""
