"""Pure rules and values: which batch is made when, where and with which seed."""
