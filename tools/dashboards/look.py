"""The look of all dashboards: one data source, one colour per rank, units, thresholds and legends chosen once."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self, TypeVar

from grafana_foundation_sdk.builders import bargauge, common, dashboard, stat, statetimeline, table, timeseries
from grafana_foundation_sdk.builders.prometheus import Dataquery as Query
from grafana_foundation_sdk.cog import variants
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import common as shapes
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import prometheus

SOURCE = models.DataSourceRef(type_val="prometheus", uid="prometheus")
GOOD, WARN, BAD, PLAIN = "green", "orange", "red", "text"
BLUE, ORANGE, PURPLE, CYAN, YELLOW, GREY = "#5794F2", "#FF9830", "#B877D9", "#37C8C8", "#FADE2A", "#8E8E8E"
GREEN, PALE = "#56A64B", "#8AB8FF"
# Ranks 3, 13 and 23 share a colour. No red and no green: those say bad and good.
RANK_COLORS = (BLUE, ORANGE, PURPLE, CYAN, YELLOW, "#F48FB1", "#A0855B", "#C0D8FF", "#8E7CFF", "#D0D0D0")
TIMES, PER_SECOND = "suffix:×", "suffix:/s"

Steps = Sequence[tuple[float | None, str]]


class Panel(Protocol):
    """The methods that builders of all kinds of panels have."""

    def build(self) -> models.Panel: ...
    def title(self, title: str) -> Self: ...
    def description(self, description: str) -> Self: ...
    def datasource(self, datasource: models.DataSourceRef) -> Self: ...
    def span(self, w: int) -> Self: ...
    def height(self, h: int) -> Self: ...
    def unit(self, unit: str) -> Self: ...
    def decimals(self, decimals: float) -> Self: ...
    def targets(self, targets: list[Builder[variants.Dataquery]]) -> Self: ...
    def thresholds(self, thresholds: Builder[models.ThresholdsConfig]) -> Self: ...
    def color_scheme(self, color: Builder[models.FieldColor]) -> Self: ...
    def no_value(self, no_value: str) -> Self: ...
    def override_by_regexp(self, regexp: str, properties: list[models.DynamicConfigValue]) -> Self: ...


Kind = TypeVar("Kind", bound=Panel)


def now(expr: str, legend: str = "") -> Query:
    """The value at the end of the dashboard's time range."""
    return Query().expr(expr).legend_format(legend).instant()


def over_time(expr: str, legend: str = "") -> Query:
    """The value all along the dashboard's time range."""
    return Query().expr(expr).legend_format(legend).range()


def each_rank(expr: str, legend: str = "rank {{rank}}") -> Query:
    """A curve per rank, in the order of ranks."""
    return over_time(f"max by (rank) ({expr})", legend)


def column(expr: str) -> Query:
    """A column of a table: labels and value, at the end of the time range."""
    return Query().expr(expr).instant().format(prometheus.PromQueryFormat.TABLE)


def queries_of(given: Sequence[Query | str], query: Callable[[str], Query]) -> list[Query]:
    """The queries, of which those that are only an expression get a query without a legend."""
    return [query(one) if isinstance(one, str) else one for one in given]


def thresholds(steps: Steps) -> dashboard.ThresholdsConfig:
    mode = models.ThresholdsMode.ABSOLUTE
    return dashboard.ThresholdsConfig().mode(mode).steps([models.Threshold(value, color) for value, color in steps])


def color(mode: models.FieldColorModeId) -> dashboard.FieldColor:
    return dashboard.FieldColor().mode(mode)


def set_to(**properties: Any) -> list[models.DynamicConfigValue]:
    """Properties of an override; `custom__width` stands for `custom.width`."""
    return [
        models.DynamicConfigValue(id_val=name.replace("__", "."), value=value) for name, value in properties.items()
    ]


def fixed(name: str) -> dict[str, str]:
    return {"mode": "fixed", "fixedColor": name}


def limits(*steps: tuple[float, str]) -> dict[str, object]:
    """Thresholds as a property of an override: plain below the first."""
    first = {"color": PLAIN, "value": None}
    return {"mode": "absolute", "steps": [first, *({"color": color, "value": value} for value, color in steps)]}


def shows(texts: Mapping[str, tuple[str, str]]) -> list[models.ValueMapping]:
    """Value -> (text, colour)."""
    results = {
        value: models.ValueMappingResult(text=text, color=color, index=index)
        for index, (value, (text, color)) in enumerate(texts.items())
    }
    return [models.ValueMap(options=results)]


COLORED: dict[str, Any] = {"custom__cellOptions": {"type": "color-text"}}
"""A table's cell whose text has the colour of its threshold or mapping."""
GAUGE: dict[str, Any] = {"custom__cellOptions": {"type": "gauge", "mode": "basic", "valueDisplayMode": "text"}}
WASTE = limits((0.1, WARN), (0.3, BAD))
"""Of a fraction of the time that is lost: as the default of overhead_target."""


def colored(panel: Kind, names: Mapping[str, str]) -> Kind:
    """The colour of each curve, by its name."""
    for name, chosen in names.items():
        panel = panel.override_by_regexp(f"/^{name}$/", set_to(color=fixed(chosen)))
    return panel


def with_rank_colors(panel: Kind) -> Kind:
    """The same colour for a rank in every panel: by the last digit of the first number in its name."""
    for digit, name in enumerate(RANK_COLORS):
        panel = panel.override_by_regexp(f"/^(rank )?\\d*{digit}\\b/", set_to(color=fixed(name)))
    return panel


def framed(panel: Kind, title: str, text: str, queries: Sequence[Query], unit: str, steps: Steps) -> Kind:
    """Adds what every panel must say: its title, what is good or bad, and its unit."""
    targets = [query.ref_id(chr(ord("A") + index)) for index, query in enumerate(queries)]
    framed = panel.title(title).description(text).datasource(SOURCE).unit(unit).targets(list(targets))
    return framed.thresholds(thresholds(steps))


def last() -> common.ReduceDataOptions:
    return common.ReduceDataOptions().calcs(["lastNotNull"])


def legend() -> common.VizLegendOptions:
    options = common.VizLegendOptions().display_mode(shapes.LegendDisplayMode.LIST)
    return options.placement(shapes.LegendPlacement.BOTTOM).show_legend(True)


def figure(
    title: str, text: str, *queries: Query | str, unit: str, steps: Steps = ((None, PLAIN),), span: int = 3
) -> stat.Panel:
    """One number to be read from across the room."""
    panel = (
        framed(stat.Panel(), title, text, queries_of(queries, now), unit, steps)
        .color_scheme(color(models.FieldColorModeId.THRESHOLDS))
        .color_mode(shapes.BigValueColorMode.VALUE)
        .graph_mode(shapes.BigValueGraphMode.NONE)
        .justify_mode(shapes.BigValueJustifyMode.CENTER)
        .reduce_options(last())
        .no_value("–")
    )
    return panel.span(span).height(4)


def lines(
    title: str,
    text: str,
    *queries: Query | str,
    unit: str,
    steps: Steps = ((None, GOOD),),
    by_rank: bool = False,
    colors: Mapping[str, str] | None = None,
    span: int = 12,
) -> timeseries.Panel:
    """Curves, with `by_rank` one for each rank; the legend has the last values, thresholds are dashed lines, `colors`
    are by name.
    """
    style = common.GraphThresholdsStyleConfig().mode(
        shapes.GraphThresholdsStyleMode.DASHED if len(steps) > 1 else shapes.GraphThresholdsStyleMode.OFF
    )
    panel = (
        framed(timeseries.Panel(), title, text, queries_of(queries, each_rank if by_rank else over_time), unit, steps)
        .color_scheme(color(models.FieldColorModeId.PALETTE_CLASSIC))
        .thresholds_style(style)
        .line_width(2)
        .fill_opacity(0)
        .show_points(shapes.VisibilityMode.AUTO)
        .min(0)
        .legend(legend().calcs(["lastNotNull"]))
        .tooltip(common.VizTooltipOptions().mode(shapes.TooltipDisplayMode.MULTI).sort(shapes.SortOrder.DESCENDING))
    )
    panel = with_rank_colors(panel) if by_rank else colored(panel, colors or {})
    return panel.span(span).height(8)


def stacked(panel: timeseries.Panel) -> timeseries.Panel:
    """Curves on top of each other, as areas, for numbers that jump."""
    return (
        panel.stacking(common.StackingConfig().mode(shapes.StackingMode.NORMAL).group("A"))
        .fill_opacity(60)
        .line_width(0)
        .line_interpolation(shapes.LineInterpolation.STEP_AFTER)
        .show_points(shapes.VisibilityMode.NEVER)
    )


def bars(title: str, text: str, *queries: Query, unit: str) -> bargauge.Panel:
    """Lying bars, one per series."""
    panel = (
        framed(bargauge.Panel(), title, text, queries, unit, ((None, GOOD),))
        .color_scheme(color(models.FieldColorModeId.THRESHOLDS))
        .display_mode(shapes.BarGaugeDisplayMode.BASIC)
        .orientation(shapes.VizOrientation.HORIZONTAL)
        .name_placement(shapes.BarGaugeNamePlacement.LEFT)
        .show_unfilled(True)
        .sizing(shapes.BarGaugeSizing.MANUAL)
        .min_viz_height(16)
        .max_viz_height(56)
        .text(common.VizTextDisplayOptions().title_size(14).value_size(18))
        .reduce_options(last())
        .min(0)
    )
    return panel.span(8).height(8)


def timeline(title: str, text: str, *queries: Query, texts: Mapping[str, tuple[str, str]]) -> statetimeline.Panel:
    """Who was in which state, when."""
    panel = (
        framed(statetimeline.Panel(), title, text, queries, "short", ((None, PLAIN),))
        .mappings(shows(texts))
        .show_value(shapes.VisibilityMode.AUTO)
        .merge_values(True)
        .row_height(0.8)
        .fill_opacity(80)
        .line_width(0)
        .legend(legend())
    )
    return panel.span(24).height(8)


def rows(title: str, text: str, columns: Mapping[str, Query], *, labels: Mapping[str, str]) -> table.Panel:
    """A table: a row for each set of labels, a column for each query; without a name it only brings labels."""
    names = {f"Value #{chr(ord('A') + index)}": name for index, name in enumerate(columns)}
    order = [*labels, *names]
    organize = {
        "excludeByName": {"Time": True, **{name: True for name, heading in names.items() if not heading}},
        "indexByName": {name: index for index, name in enumerate(order)},
        "renameByName": {**labels, **{name: heading for name, heading in names.items() if heading}},
    }
    panel = framed(table.Panel(), title, text, list(columns.values()), "short", ((None, PLAIN),))
    return (
        panel.with_transformation(models.DataTransformerConfig(id_val="merge", options={}))
        .with_transformation(models.DataTransformerConfig(id_val="organize", options=organize))
        .min_width(80)
        .cell_height(shapes.TableCellHeight.SM)
        .show_header(True)
        .sort_by([common.TableSortByFieldState().display_name(next(iter(labels.values()))).desc(False)])
        .span(24)
        .height(6)
    )


class Event(Builder[models.AnnotationQuery]):
    """Marks the moments at which a counter rises. Grafana's own type has no place for the texts."""

    def __init__(self, name: str, counter: str, text: str, color: str, *, only: str = "") -> None:
        self._name, self._counter, self._text, self._color, self._only = name, counter, text, color, only

    def build(self) -> models.AnnotationQuery:
        expr = f"({self._counter} - {self._counter} offset $__interval{self._only}) > 0"
        return EventQuery(name=self._name, expr=expr, icon_color=self._color, datasource=SOURCE, text=self._text)


class EventQuery(models.AnnotationQuery):
    """An annotation query with the texts that the Prometheus data source shows."""

    def __init__(self, *, text: str, **more: Any) -> None:
        super().__init__(**more)
        self._text = text

    def to_json(self) -> dict[str, object]:
        """As Grafana reads it: the query in `target`, the texts beside it."""
        known = super().to_json()
        target = {"expr": known.pop("expr"), "refId": "Anno", "range": True, "instant": False}
        texts = {"titleFormat": self.name, "textFormat": self._text, "tagKeys": "", "useValueForTime": False}
        return {**known, "target": target, **texts}


def page(
    uid: str,
    title: str,
    text: str,
    *parts: Builder[models.Panel] | str,
    events: Sequence[Event] = (),
    variables: Sequence[dashboard.QueryVariable] = (),
) -> dashboard.Dashboard:
    """A dashboard of panels, and of headings of the rows below them, with links to the others that keep the time range
    and the variables.
    """
    links = (
        dashboard.DashboardLink("elche")
        .type(models.DashboardLinkType.DASHBOARDS)
        .tags(["elche"])
        .keep_time(True)
        .include_vars(True)
    )
    made = (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(text)
        .tags(["elche"])
        .time("now-1h", "now")
        .refresh("10s")
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .link(links)
    )
    for choice in variables:
        made.with_variable(choice)
    for event in events:
        made.annotation(event)
    for part in parts:
        if isinstance(part, str):
            made.with_row(dashboard.Row(part))
        else:
            made.with_panel(part)
    return made


def variable(name: str, label: str, query: str) -> dashboard.QueryVariable:
    """A choice whose values Prometheus knows."""
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(SOURCE)
        .query({"query": query, "refId": name, "qryType": 1})
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.NUMERICAL_ASC)
    )


JOB = variable("job", "Job", "label_values(elche_job_info, job)").sort(models.VariableSort.ALPHABETICAL_ASC)
RANK = (
    variable("rank", "Ranks", 'label_values(elche_rank_state{job="$job"}, rank)')
    .multi(True)
    .include_all(True)
    .all_value(".*")
    .current(models.VariableOption(selected=True, text=["All"], value=["$__all"]))
)
