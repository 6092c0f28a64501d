"""Reports on one HTML page: what a call of a verb did, results over methods and seeds, their tables and charts."""

from secateur.report.measured import Timed as Timed
from secateur.report.measured import before_and_after as before_and_after
from secateur.report.measured import count_multiply_adds as count_multiply_adds
from secateur.report.measured import environment as environment
from secateur.report.page import Account as Account
from secateur.report.page import Reported as Reported
from secateur.report.page import check_page as check_page
from secateur.report.page import write_account as write_account
from secateur.report.results import Results as Results
from secateur.report.results import Row as Row
from secateur.report.results import Run as Run
from secateur.report.results import load_results as load_results
from secateur.report.results import save_results as save_results
from secateur.report.results import summarize as summarize
