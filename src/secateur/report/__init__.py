"""Reports on one HTML page: results, their tables and plots."""

from secateur.report.account import Account, Cells, Chart, Sheet, Timed, before_and_after
from secateur.report.page import Reported, check_page, write_account, write_report
from secateur.report.results import (
    Check,
    History,
    Network,
    Results,
    Row,
    Run,
    count_multiply_adds,
    describe,
    environment,
    load_results,
    missing_baselines,
    print_summary,
    save_results,
    summarize,
)

__all__ = [
    "Account",
    "Cells",
    "Chart",
    "Check",
    "History",
    "Network",
    "Reported",
    "Results",
    "Row",
    "Run",
    "Sheet",
    "Timed",
    "before_and_after",
    "check_page",
    "count_multiply_adds",
    "describe",
    "environment",
    "load_results",
    "missing_baselines",
    "print_summary",
    "save_results",
    "summarize",
    "write_account",
    "write_report",
]
