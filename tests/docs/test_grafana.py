"""The dashboard and the alerts are well formed; that each metric is exported a real run shows (tests/integration/test_run_seen.py)."""

import re

from promql import alerts, expressions, label_names, metric_names, panels


def test_the_metrics_of_an_expression_are_found() -> None:
    expression = (
        'max by (lag, process) (rate(a_b{phase=~"x|y"}[5m])) / on (p) group_left (q) sum(c{d="e"} offset 5m) > bool 0.5 and f == 1e3'
    )
    assert metric_names(expression) == {"a_b", "c", "f"}
    assert label_names(expression) == {"lag", "process", "phase", "d"}


def test_the_dashboard_has_each_panel_once_in_a_place_of_its_own() -> None:
    shown = list(panels())
    assert len(shown) > 20
    assert len({panel["id"] for panel in shown}) == len({panel["title"] for panel in shown}) == len(shown)
    squares = [
        (place["x"] + i, place["y"] + j)
        for place in (panel["gridPos"] for panel in shown)
        for i in range(place["w"])
        for j in range(place["h"])
    ]
    assert len(set(squares)) == len(squares)
    assert max(x for x, _ in squares) == 23


def test_each_alert_says_what_to_do_and_names_labels_that_it_has() -> None:
    for rule in alerts():
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        used = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        assert used <= label_names(rule["expr"]) | {"process"}, rule["alert"]


def test_every_query_names_a_metric_of_ours() -> None:
    for title, expression in expressions().items():
        names = metric_names(expression)
        assert names, title
        assert all(name.startswith(("slimebus_", "process_")) for name in names), title
