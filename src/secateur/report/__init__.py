"""Reports on one HTML page: results, their tables and plots."""

from secateur.report.account import Account, Cells, Chart, Sheet
from secateur.report.describing import count_multiply_adds, describe
from secateur.report.page import check_page, write_account, write_report
from secateur.report.reported import Reported
from secateur.report.results import Check, History, Network, Results, Run, environment, load_results, save_results
from secateur.report.summary import Row, missing_baselines, summarize
from secateur.report.tables import print_summary
from secateur.report.timed import Timed, before_and_after

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
