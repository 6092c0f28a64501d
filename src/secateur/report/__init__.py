"""What happened, on one page: results, their tables and plots, and the page."""

from secateur.report.page import write_report
from secateur.report.results import (
    Check,
    History,
    Network,
    Results,
    Row,
    Run,
    count_multiply_adds,
    describe,
    load_results,
    missing_baselines,
    print_summary,
    save_results,
    summarize,
)

__all__ = [
    "Check",
    "History",
    "Network",
    "Results",
    "Row",
    "Run",
    "count_multiply_adds",
    "describe",
    "load_results",
    "missing_baselines",
    "print_summary",
    "save_results",
    "summarize",
    "write_report",
]
