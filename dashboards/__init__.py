"""What Prometheus and Grafana need to show a training run; see README.md.

grafana.py    panels as values, and the JSON of a dashboard made of them (Grafana's classic schema)
promql.py     what their queries are made of
contents.py   the dashboard: the first rows, variables and annotations
machinery.py  its other rows
__main__.py   `python -m dashboards` writes dpex.json
"""
