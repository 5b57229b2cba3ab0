"""What Prometheus and Grafana need to show a training run; see README.md.

grafana.py    how panels of each kind look, built by Grafana's SDK (which needs Python 3.11)
promql.py     what their queries are made of
contents.py   the dashboard: the first rows, variables and annotations
machinery.py  its other rows
__main__.py   `python -m dashboards` writes dpex.json
"""
