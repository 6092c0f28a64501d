"""Reports on one HTML page: what a call of a verb did, results over methods and seeds, their tables and charts."""

from secateur.report.measured import Timed, before_and_after, count_multiply_adds, environment
from secateur.report.page import Account, Reported, check_page, write_account
from secateur.report.results import Check, Results, Row, Run, load_results, save_results, summarize

__all__ = [
    "Account",
    "Check",
    "Reported",
    "Results",
    "Row",
    "Run",
    "Timed",
    "before_and_after",
    "check_page",
    "count_multiply_adds",
    "environment",
    "load_results",
    "save_results",
    "summarize",
    "write_account",
]
