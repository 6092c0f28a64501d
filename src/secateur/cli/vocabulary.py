"""``secateur vocabulary``: tokens leave a directory's tokenizer, and their rows its tensors.

Law: results on stdout, everything else on stderr; whatever is wrong with the input is one line and exit code 2.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from secateur.cli.options import DryRun, Report
from secateur.cli.terminal import clear_errors, command_line, page_at, show, terminable, timing_of


def vocabulary(
    directory: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="A Hugging Face directory with its tokenizer; none of its code is run."),
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="OUT", help="The directory to write. Must not exist.", show_default=False)
    ] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Text, .txt or .jsonl, a sample of what will be read. Repeatable."),
    ] = None,
    keep: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Keep this many tokens, those that the text has most often.")
    ] = None,
    cover: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Keep this share of the text's tokens, such as 0.9999: the rarest leave."),
    ] = None,
    script: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Tokens with letters of other scripts leave, such as Latin. Repeatable."),
    ] = None,
    multiple: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Keep more until their number is a multiple of this.")
    ] = None,
    rank: Annotated[
        str | None,
        typer.Option(
            metavar="RANK",
            help="What leaves next: count, the rarest; or distance, times how far its row is from others.",
        ),
    ] = None,
    exact: Annotated[
        bool,
        typer.Option("--exact", help="Keep only the text's own tokens, and none that other text of its kind needs."),
    ] = False,
    field: Annotated[str, typer.Option(metavar="NAME", help="Of the records in .jsonl that holds the text.")] = "text",
    dry_run: DryRun = False,
    report: Report = None,
) -> None:
    """Take the tokens that a text does not need out of a model and its tokenizer.

    Their rows leave the embedding, the head and what else counts tokens; tokenizer, configurations and special tokens
    follow, and from_pretrained loads all of OUT. A text whose tokens all stay is read as before, under new numbers, and
    its hidden states are the same bit for bit: that is proved on the text and on random Unicode, in each run.

    A text is a sample: beside its tokens as many of the tokenizer's own order stay as the last tenth of the text says
    are needed for 99.5 % of unseen tokens to stay. --exact keeps the text's own alone; --keep and --cover say it
    otherwise. `secateur trim` is another name of this command.

    Added and special tokens, those of chat templates, bytes and single letters stay. Without a text the tokenizer's own
    order says what is rare. At least one of --data, --keep and --script says what may leave.
    """
    with clear_errors(), terminable():
        page = page_at(report)
        if out is None and not dry_run:
            raise ValueError("give --out OUT, the directory to write; or --dry-run, to see what would leave.")
        asked: dict[str, Any] = {
            "out": out,
            "data": [str(path) for path in data or ()] or None,
            "keep": keep,
            "cover": cover,
            "script": script,
            "multiple": multiple,
            "rank": rank,
            "exact": exact,
            "field": field if field != "text" else None,
            "dry_run": dry_run,
        }
        from secateur.checkpoints import called_as
        from secateur.cli.printing import shrunken_parts
        from secateur.support import documents
        from secateur.vocabulary import shrink_vocabulary, shrunken_sheets

        for path in data or ():
            documents.checked_kind(path)
        with called_as({"command": command_line("vocabulary", directory, **asked)}):
            done = shrink_vocabulary(
                directory,
                None,
                (text for path in data for text in documents.read_documents(path, field)) if data else None,
                keep=keep,
                cover=cover,
                script=script,
                multiple=multiple,
                rank=rank,
                exact=exact,
                out=None if dry_run else out,
            )
        show(shrunken_parts(done))
        page.write(
            f"{directory}, its vocabulary",
            "vocabulary",
            [directory],
            asked,
            shrunken_parts(done),
            lambda: shrunken_sheets(done),
            timing_of(directory, done.out),
        )
