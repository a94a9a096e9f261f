"""A job's progress in a notebook, as HTML that is updated."""

import threading
import time
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

EVERY_S = 0.5
STYLE = "font-variant-numeric:tabular-nums;padding:0 8px;text-align:"


def progress_html(view: Mapping[str, Any]) -> str:
    """HTML of a job, given by the fields of a `JobView`: its state, a progress bar, and its ranks."""
    size, num_epochs = view.get("dataset_size") or 0, view.get("num_epochs") or 0
    done = view.get("epoch", 0) * size + view.get("epoch_committed", 0)
    fraction = min(1.0, done / (size * num_epochs)) if size and num_epochs else 0.0
    if view.get("state") == "succeeded":
        fraction = 1.0
    loss = view.get("loss")
    facts = [
        escape(str(view.get("state", ""))),
        f"epoch {min(view.get('epoch', 0) + 1, num_epochs)} of {num_epochs}" if num_epochs else "",
        f"loss {loss:.4g}" if isinstance(loss, int | float) else "",
        f"{view.get('samples_per_s') or 0:,.0f} samples/s",
        escape(str(view.get("reason") or "")),
    ]
    rows = "".join(
        f"<tr><td style='{STYLE}right'>{int(rank['rank'])}</td>"
        f"<td style='{STYLE}left'>{escape(str(rank['device']))}</td>"
        f"<td style='{STYLE}left'>{escape(str(rank['state']))}</td>"
        f"<td style='{STYLE}right'>{rank['ms_per_batch']:.1f} ms/batch</td>"
        f"<td style='{STYLE}right'>{rank['share_fraction']:.0%}</td></tr>"
        for rank in (view.get("ranks") or ())[:16]
    )
    return (
        f"<div><b>{escape(str(view.get('name') or view.get('job_id') or 'job'))}</b> "
        f"{' · '.join(fact for fact in facts if fact)}<br>"
        f"<progress max='1' value='{fraction:.4f}' style='width:24em'></progress> {fraction:.0%}"
        f"<table>{rows}</table></div>"
    )


def show_live(views: Iterable[Mapping[str, Any]]) -> None:
    """Displays the newest view at intervals until there are no more, on a thread, so that the cell ends at once."""
    from IPython import display as ipython

    html: Any = ipython.HTML
    shown: Any = ipython.display(html("<div>the job starts</div>"), display_id=True)  # type: ignore[no-untyped-call]

    def refresh() -> None:
        text, shown_s, problem = "", -EVERY_S, ""
        try:
            for view in views:
                text = progress_html(view)
                if time.monotonic() - shown_s >= EVERY_S:
                    shown_s = time.monotonic()
                    shown.update(html(text))
        except Exception as error:  # on a thread, where no caller could handle it
            problem = f"<div>its progress is not shown any more: {escape(str(error))}</div>"
        shown.update(html(text + problem))

    threading.Thread(target=refresh, name="progress in a notebook", daemon=True).start()
