"""How the panels of each kind look: what Grafana's own SDK builds, with the choices that they share.

The result is the classic schema, which Grafana 10 to 13 load and later versions convert. Panels are laid out by their
order and size, from left to right, 24 columns wide, and each line of them is filled. Ids are numbers in that order.

Each panel takes these arguments, beside those of its kind:

    title, description
    queries          what `query` makes, one or several
    unit             one of Grafana's names of units
    width, height    in columns, and in Grafana's lines
    lowest, highest  the ends of the axis; None: by the data
    steps            colours from a value on, the first one from the bottom: (value, colour)
    none             what is shown where there is no data
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from grafana_foundation_sdk.builders import (
    common,
    dashboard,
    heatmap,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as choices
from grafana_foundation_sdk.models import dashboard as schema
from grafana_foundation_sdk.models import heatmap as heatmap_choices
from grafana_foundation_sdk.models.prometheus import PromQueryFormat, QueryEditorMode

SCHEMA_VERSION = 39
"""That of Grafana 10. The SDK's own is newer, and nothing here needs it."""
SOURCE = choices.DataSourceRef(type_val="prometheus", uid="${datasource}")

VALUE_AND_NAME = choices.BigValueTextMode.VALUE_AND_NAME

Steps = Sequence[tuple[float | None, str]]


class Row(NamedTuple):
    """A headline, and the panels below it, which a folded row shows only once it is clicked."""

    title: str
    panels: tuple[Any, ...]
    is_folded: bool = False


def query(*, expr: str, legend: str = "__auto", instant: bool = False) -> prometheus.Dataquery:
    """One PromQL expression. ``legend`` names its series; ``instant``: only its value at the end of the time range."""
    made = prometheus.Dataquery().datasource(SOURCE).editor_mode(QueryEditorMode.CODE).expr(expr).legend_format(legend)
    return made.instant() if instant else made.range()


# -- kinds of panels ---------------------------------------------------------------------------------------------------


def graph(*, stacked: bool = False, bars: bool = False, dashed: str = "", steps: Steps = (), **content: Any) -> Any:
    """Lines over time, or bars. ``dashed`` are series drawn so, by a regular expression of their names."""
    made = (
        timeseries.Panel()
        .legend(_legend(choices.LegendDisplayMode.TABLE).calcs(["lastNotNull", "mean"]))
        .tooltip(_tooltip())
        .draw_style(choices.GraphDrawStyle.BARS if bars else choices.GraphDrawStyle.LINE)
        .fill_opacity(60 if stacked or bars else 8)
        .line_width(1)
        .show_points(choices.VisibilityMode.NEVER)
        .span_nulls(False)
        .stacking(
            common.StackingConfig()
            .group("A")
            .mode(choices.StackingMode.NORMAL if stacked else choices.StackingMode.NONE)
        )
        .thresholds_style(
            common.GraphThresholdsStyleConfig().mode(
                choices.GraphThresholdsStyleMode.DASHED if steps else choices.GraphThresholdsStyleMode.OFF
            )
        )
    )
    if dashed:
        line = schema.DynamicConfigValue(id_val="custom.lineStyle", value={"dash": [8, 8], "fill": "dash"})
        empty = schema.DynamicConfigValue(id_val="custom.fillOpacity", value=0)
        made.override_by_regexp(dashed, [line, empty])
    _by_palette(made, steps)
    return _axis(made, **content)


def number(
    *, text: choices.BigValueTextMode = choices.BigValueTextMode.VALUE, steps: Steps = (), **content: Any
) -> Any:
    """One large number, or one for each series. ``text``: whether their names are shown, too."""
    made = (
        stat.Panel()
        .color_mode(choices.BigValueColorMode.VALUE)
        .graph_mode(choices.BigValueGraphMode.NONE)
        .justify_mode(choices.BigValueJustifyMode.AUTO)
        .orientation(choices.VizOrientation.AUTO)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).fields("").values(False))
        .text_mode(text)
    )
    _by_thresholds(made, steps or [(None, "text")])
    return _axis(made, **content)


def time_line(*, steps: Steps, **content: Any) -> Any:
    """A bar for each series, whose colour is its value at that time."""
    made = (
        statetimeline.Panel()
        .align_value(choices.TimelineValueAlignment.LEFT)
        .legend(_legend(choices.LegendDisplayMode.LIST))
        .merge_values(True)
        .row_height(0.9)
        .show_value(choices.VisibilityMode.NEVER)
        .tooltip(_tooltip())
        .fill_opacity(80)
        .line_width(0)
    )
    _by_thresholds(made, steps)
    return _axis(made, **content)


def heat_map(*, unit: str, **content: Any) -> Any:
    """The buckets of a histogram over time."""
    made = (
        heatmap.Panel()
        .calculate(False)
        .cell_gap(1)
        .color(
            heatmap.HeatmapColorOptions()
            .exponent(0.5)
            .fill("dark-orange")
            .mode(heatmap_choices.HeatmapColorMode.SCHEME)
            .reverse(False)
            .scale(heatmap_choices.HeatmapColorScale.EXPONENTIAL)
            .scheme("Oranges")
            .steps(64)
        )
        .exemplars_color("rgba(255,0,255,0.7)")
        .filter_values(heatmap.FilterValueRange().le(1e-9))
        .show_legend()
        .rows_frame(heatmap.RowsHeatmapOptions().layout(choices.HeatmapCellLayout.AUTO))
        .tooltip(
            heatmap.HeatmapTooltip().mode(choices.TooltipDisplayMode.SINGLE).show_color_scale(False).y_histogram(False)
        )
        .y_axis(heatmap.YAxisConfig().axis_placement(choices.AxisPlacement.LEFT).reverse(False).unit(unit))
        .hide_from(common.HideSeriesConfig().legend(False).tooltip(False).viz(False))
        .scale_distribution(common.ScaleDistributionConfig().type(choices.ScaleDistribution.LINEAR))
    )
    return _panel(made, PromQueryFormat.HEATMAP, **content)


def label_table(*, unit: str, hidden: Sequence[str] = (), **content: Any) -> Any:
    """The labels of series. ``hidden`` are columns that are not shown."""
    made = table.Panel().cell_height(choices.TableCellHeight.SM).show_header(True).unit(unit).mappings([])
    _by_palette(made, ())
    columns = dict.fromkeys(("Time", "Value", "__name__", *hidden), True)
    options = {"excludeByName": columns, "indexByName": {}, "renameByName": {}}
    made.with_transformation(schema.DataTransformerConfig(id_val="organize", options=options))
    return _panel(made, PromQueryFormat.TABLE, **content)


# -- what they share ---------------------------------------------------------------------------------------------------


def _legend(mode: choices.LegendDisplayMode) -> common.VizLegendOptions:
    return common.VizLegendOptions().display_mode(mode).placement(choices.LegendPlacement.BOTTOM).show_legend(True)


def _tooltip() -> common.VizTooltipOptions:
    return common.VizTooltipOptions().mode(choices.TooltipDisplayMode.MULTI).sort(choices.SortOrder.DESCENDING)


def _by_thresholds(made: Any, steps: Steps) -> None:
    _coloured(made, schema.FieldColorModeId.THRESHOLDS, steps)


def _by_palette(made: Any, steps: Steps) -> None:
    _coloured(made, schema.FieldColorModeId.PALETTE_CLASSIC, steps or [(None, "green")])


def _coloured(made: Any, mode: schema.FieldColorModeId, steps: Steps) -> None:
    made.color_scheme(dashboard.FieldColor().mode(mode))
    found = [schema.Threshold(value=value, color=colour) for value, colour in steps]
    made.thresholds(dashboard.ThresholdsConfig().mode(schema.ThresholdsMode.ABSOLUTE).steps(found))


def _axis(
    made: Any, *, unit: str, lowest: float | None = 0, highest: float | None = None, none: str = "", **content: Any
) -> Any:
    made.unit(unit).mappings([])
    if lowest is not None:
        made.min(lowest)
    if highest is not None:
        made.max(highest)
    if none:
        made.no_value(none)
    return _panel(made, PromQueryFormat.TIME_SERIES, **content)


def _panel(
    made: Any,
    wanted: PromQueryFormat,
    *,
    title: str,
    description: str,
    queries: Sequence[prometheus.Dataquery],
    width: int = 8,
    height: int = 8,
) -> Any:
    made.title(title).description(description).datasource(SOURCE).span(width).height(height)
    for place, one in enumerate(queries):
        made.with_target(one.format(wanted).ref_id(chr(ord("A") + place)))
    return made


# -- around the panels -------------------------------------------------------------------------------------------------


def variable(*, name: str, label: str, query: str, everything: str = ".*") -> dashboard.QueryVariable:
    """A label whose values can be chosen; ``everything`` is what "All" stands for."""
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(SOURCE)
        .definition(query)
        .query({"qryType": 1, "query": query, "refId": f"variable-{name}"})
        .all_value(everything)
        .current(schema.VariableOption(selected=True, text=["All"], value=["$__all"]))
        .hide(schema.VariableHide.DONT_HIDE)
        .include_all(True)
        .multi(True)
        .options([])
        .refresh(schema.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .regex("")
        .sort(schema.VariableSort.NUMERICAL_ASC)
    )


def annotation(*, name: str, expr: str, title: str, text: str, colour: str) -> dashboard.AnnotationQuery:
    """Marks on all panels, wherever ``expr`` has a value."""
    return (
        _switch()
        .name(name)
        .datasource(SOURCE)
        .enable(True)
        .hide(False)
        .icon_color(colour)
        .expr(expr)
        .step("15s")
        .title_format(title)
        .text_format(text)
    )


def _source_variable() -> dashboard.DatasourceVariable:
    return (
        dashboard.DatasourceVariable("datasource")
        .label("Data source")
        .type("prometheus")
        .hide(schema.VariableHide.DONT_HIDE)
        .regex("")
    )


def _switch() -> dashboard.AnnotationQuery:
    """Marks whose switch is beside the variables, where it is seen: the SDK would put it into a menu."""
    return dashboard.AnnotationQuery().placement(None)


def _built_in() -> dashboard.AnnotationQuery:
    """What Grafana adds to every dashboard: its own marks, switched on and out of sight."""
    return (
        _switch()
        .built_in(1)
        .datasource(choices.DataSourceRef(type_val="grafana", uid="-- Grafana --"))
        .enable(True)
        .hide(True)
        .icon_color("rgba(0, 211, 255, 1)")
        .name("Annotations & Alerts")
        .type("dashboard")
    )


def as_text(
    *,
    uid: str,
    title: str,
    description: str,
    tags: Sequence[str],
    rows: Sequence[Row],
    variables: Sequence[dashboard.QueryVariable],
    annotations: Sequence[dashboard.AnnotationQuery],
) -> str:
    """Return the file of a dashboard. ``uid`` is its address and never changes."""
    made = (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags(list(tags))
        .readonly()
        .tooltip(schema.DashboardCursorSync.CROSSHAIR)
        .refresh("10s")
        .time("now-30m", "now")
        .timezone("browser")
        .fiscal_year_start_month(0)
        .live_now(False)
        .links([])
        .annotations([_built_in(), *annotations])
        .variables([_source_variable(), *variables])
    )
    number = 0
    for row in rows:
        number += 1
        headline = dashboard.Row(row.title).id(number)
        panels = [panel.id(number + place) for place, panel in enumerate(row.panels, 1)]
        number += len(panels)
        for panel in panels if row.is_folded else ():
            headline.with_panel(panel)
        made.with_row(headline)
        for panel in () if row.is_folded else panels:
            made.with_panel(panel)
    built = made.build()
    built.schema_version = SCHEMA_VERSION
    return JSONEncoder(indent=2, ensure_ascii=False).encode(built) + "\n"
