"""The tables of links to other sites, of where requests of tenants ran, and of what was refused."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from services.cli.fleet.fitted_table import Column, fitted_table
from services.cli.fleet.times import since
from shared.fleet.link_view import LinkView
from shared.fleet.tenant_views import TenantRefusal, TenantSite

MAX_TENANTS = 8
UNITS = ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"))


def tables_of_links(links: Sequence[LinkView], width: int, wall_s: float) -> list[RenderableType]:
    """Returns nothing without links."""
    if not links:
        return []
    columns: tuple[Column[LinkView], ...] = (
        Column("site", lambda each: each.site),
        Column("region", lambda each: each.region or "-", 5),
        Column("models", _models, 9),
        Column("round trip", _round_trip, 1, is_number=True),
        Column("sent", lambda each: rate_text(each.sent_per_s), 3, is_number=True),
        Column("received", lambda each: rate_text(each.received_per_s), 3, is_number=True),
        Column("KV received", _kv, 4, is_number=True),
        Column("requests there", _placed, 2, is_number=True),
        Column("for want of room", lambda each: f"{each.num_spilled:,}", 6, is_number=True),
        Column("moved away", lambda each: f"{each.num_moved:,}", 7, is_number=True),
        Column("from there", lambda each: f"{each.num_served:,}", 4, is_number=True),
        Column("link", lambda each: _state(each, wall_s)),
    )
    losses = [Text(each.loss, style="red") for each in links if each.loss]
    return [Group(fitted_table(columns, links, width), *losses)]


def tables_of_tenants(
    sites: Sequence[TenantSite], refusals: Sequence[TenantRefusal], width: int
) -> list[RenderableType]:
    """Returns a table for each of the two, if there is anything to show."""
    return [
        *_by_tenant("requests by site and region", sites, width),
        *_by_tenant("refused outside of its regions", refusals, width),
    ]


def _by_tenant(
    heading: str, counts: Sequence[TenantSite] | Sequence[TenantRefusal], width: int
) -> list[RenderableType]:
    """Returns the first tenants, each with its counts."""
    texts: dict[str, list[str]] = {}
    for each in counts:
        texts.setdefault(each.tenant_id, []).append(str(each))
    if not texts:
        return []
    rows = [(tenant, ", ".join(found)) for tenant, found in texts.items()]
    columns: tuple[Column[tuple[str, str]], ...] = (
        Column("tenant", lambda row: row[0]),
        Column(heading, lambda row: row[1]),
    )
    table = fitted_table(columns, rows[:MAX_TENANTS], width)
    if len(rows) <= MAX_TENANTS:
        return [table]
    more = Text(f"and {len(rows) - MAX_TENANTS:,} other tenants: hearth status --json")
    return [Group(table, more)]


def rate_text(bytes_per_s: float) -> str:
    for scale, unit in UNITS:
        if bytes_per_s >= scale:
            return f"{bytes_per_s / scale:.1f} {unit}"
    return f"{bytes_per_s:.0f} B/s"


def _models(link: LinkView) -> str:
    return ", ".join(link.models[:2]) + (", …" if len(link.models) > 2 else "")


def _round_trip(link: LinkView) -> str:
    return "" if link.round_trip_s is None else f"{1e3 * link.round_trip_s:.3g} ms"


def _kv(link: LinkView) -> str:
    """Returns the rate, and its share of what the link carries."""
    if not link.kv_per_s:
        return ""
    limit = link.kv_limit_per_s
    return rate_text(link.kv_per_s) + (f" ({link.kv_per_s / limit:.0%})" if limit else "")


def _placed(link: LinkView) -> str:
    return f"{link.num_placed:,}"


def _state(link: LinkView, wall_s: float) -> Text:
    word, style = ("cut", "red") if link.is_cut else ("connected", "green")
    return Text(f"{word} since {since(link.for_s, wall_s)}", style=style)
