"""`python -m benchmarks.remote`: remote workers before and now, beside Ray Data; trainings on one cluster; a sweep.

`cells` says what is measured, `measure` and `training` are processes of their own, and `tables` makes the documents'
tables of the kept runs.
"""
