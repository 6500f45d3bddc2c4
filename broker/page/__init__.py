"""The web page of a run: a process of its own, which the broker starts, and which is also `slimebus view`.

history.py  the records of a run, thinned    samples.py   its groups, token by token
server.py   HTTP: page, events, replay       metrics.py  the same for Prometheus      process.py   how the broker starts it
static/     one page, one script, one stylesheet; uPlot draws the charts
"""
