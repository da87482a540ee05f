"""Mixes and packs three kinds of text, is killed in the middle, and ends up the same.

The corpora are on every machine: source code of Python's standard library, its documentation, and
licences. Of the tokens of a long run, 60 % are to be code, 30 % documentation and 10 % licences,
however much there is of each: a corpus that ends is begun anew, in another order. Several texts
share a row of 2,048 tokens, so that next to nothing is padding; those that are longer are split.

Two runs show that nothing is lost or repeated: one without interruption; and one that is killed by
SIGKILL between two checkpoints, and resumed from the last of them. A checksum of all batches
stands for the model: it is the same in the end.

Run::

    python examples/mixture_text.py

or one run by hand, which resumes from the checkpoint if there is one::

    python examples/mixture_text.py --checkpoint run.pickle --kill-at 100
    python examples/mixture_text.py --checkpoint run.pickle --workers 4
"""

import argparse
import os
import pickle
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from minloader import (
    Concatenated,
    Loader,
    MixtureSampler,
    PackedBatchSampler,
    pack_collate,
    sliced,
)

SHARES = {"code": 0.6, "documentation": 0.3, "licences": 0.1}  # of the tokens
STEPS = 200
EVERY = 15  # steps between two checkpoints
CAPACITY = 2_048  # tokens in a row
ROWS = 8  # in a batch
MOST = 500  # texts of a corpus, so that the example is quick
LONGEST = 8_192  # characters of a text; the rest is left out
VOCABULARY = 32_768
# Words, split at underscores and capitals; single digits; signs; line breaks with indentation.
TOKEN = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|[0-9]|\n[ \t]*|[^\sA-Za-z0-9]")


class Texts:
    """Sample ``i`` is the token ids of text ``i``, and for each the number of the corpus."""

    def __init__(self, number: int, texts: list[str]) -> None:
        self.number = number
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = TOKEN.findall(self.texts[index])
        # crc32 rather than hash(), which differs from process to process.
        hashes = np.fromiter((crc32(token.encode()) for token in tokens), np.uint32, len(tokens))
        ids = 1 + hashes % (VOCABULARY - 1)  # 0 is for padding
        return {"ids": ids, "corpus": np.full(len(ids), self.number, np.uint8)}


def read_files(*places: tuple[str, str]) -> Iterator[str]:
    """Reads the files of some folders that match a pattern each, always in the same order."""
    for folder, pattern in places:
        for path in sorted(Path(folder).glob(pattern)):
            try:
                yield path.read_text(encoding="utf-8", errors="replace")
            except OSError:  # a folder, a broken link, or not for us
                continue


def read_documentation() -> Iterator[str]:
    """Gives what ``help()`` says about the language, a topic each."""
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some systems pack it separately
        return
    yield from (text for _, text in sorted(topics.items()))


def read_corpora() -> dict[str, list[str]]:
    """Gives the texts of each corpus that this machine has."""
    stdlib, packages = sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"]
    system = "/usr/share"
    sources = {
        "code": read_files((stdlib, "*.py"), (stdlib, "*/*.py")),
        "documentation": read_documentation(),
        "licences": read_files(
            *((stdlib, "LICENSE*"), (packages, "*/LICEN*"), (packages, "*/licenses/*")),
            *((system, "common-licenses/*"), (system, "doc/*/copyright")),
        ),
    }
    corpora = {}
    for name, texts in sources.items():
        kept = [text[:LONGEST] for text in islice(filter(str.strip, texts), MOST)]
        if kept:
            corpora[name] = kept
        else:
            print(f"no {name} on this machine: the others share what it would have got")
    return corpora


def count_tokens(sample: dict[str, Any]) -> int:
    """Counts the tokens of a sample."""
    return len(sample["ids"])


def make_loader(parts: list[Texts], shares: list[float], workers: int) -> Loader:
    """Everything from the beginning, as it would be made in a new process."""
    lengths = []
    for part in parts:  # a first pass, which would be saved with a corpus that is used again
        with Loader(part, batch_size=32, transform=count_tokens, num_workers=workers) as loader:
            lengths.append(np.concatenate(list(loader)))
    # Weights are of samples, so those of long texts are lower.
    weights = [share / mean.mean() for share, mean in zip(shares, lengths, strict=True)]
    mixture = MixtureSampler(parts, weights, stop="never", shuffle=True)
    # It looks up the length of (corpus, index) as the dataset looks up the sample.
    sampler = PackedBatchSampler(
        Concatenated(lengths),
        CAPACITY,
        ROWS,
        long="split",
        window=1_000,  # texts that are packed at a time, and no more are drawn again after a kill
        shuffle=True,
        sampler=mixture,
    )
    # Items are (text, start, stop), and a text is (corpus, index).
    dataset = sliced(Concatenated(parts))
    return Loader(dataset, sampler, collate_fn=pack_collate(CAPACITY, ROWS), num_workers=workers)


def train(checkpoints: Path, workers: int, kill_at: int = 0) -> tuple[str, str]:
    """One run, from the checkpoint if there is one. Returns where it ended, and a table."""
    corpora = read_corpora()
    parts = [Texts(number, texts) for number, texts in enumerate(corpora.values())]
    shares = [SHARES[name] for name in corpora]
    step, cells, checksum = 0, 0, 0
    drawn = np.zeros((2, len(parts)), np.int64)  # pieces of text, and tokens, of each corpus
    with make_loader(parts, shares, workers) as loader:
        if checkpoints.exists():
            checkpoint = pickle.loads(checkpoints.read_bytes())
            step, cells, checksum, drawn = checkpoint["training"]
            loader.load_state_dict(checkpoint["loader"])
            print(f"from checkpoint: step {step}")
        for batch in islice(loader, STEPS - step):  # the mixture itself has no end
            ids, corpus = batch["ids"], batch["corpus"].values
            # A model would be trained here, whose attention keeps to ids.segment_ids.
            checksum = crc32(ids.values.tobytes(), checksum)
            tokens = ids.segment_ids > 0
            for row, entries in enumerate((tokens & (ids.positions == 0), tokens)):
                drawn[row] += np.bincount(corpus[entries], minlength=len(parts))
            cells += tokens.size
            step += 1
            if step % EVERY == 0:
                # The state of the loader counts the batches up to this one.
                training = step, cells, checksum, drawn
                save({"training": training, "loader": loader.state_dict()}, checkpoints)
            if step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    total = drawn[1].sum()
    table = "corpus           texts  pieces drawn   tokens drawn   asked     got"
    for name, there, pieces, own in zip(corpora, parts, *drawn.tolist(), strict=True):
        asked = SHARES[name] / sum(shares)
        table += f"\n{name:<14}{len(there):>8,}{pieces:>14,}{own:>15,}{asked:>8.0%}"
        table += f"{own / total:>8.1%}"
    end = f"step {step}, {total:,} tokens, rows {total / cells:.1%} full, all {checksum:08x}"
    return end, table


def save(checkpoint: object, path: Path) -> None:
    """Writes a checkpoint beside the former one, then puts it in its place: one is always whole."""
    fresh = path.with_suffix(".new")
    fresh.write_bytes(pickle.dumps(checkpoint))
    fresh.replace(path)


def demonstrate(workers: int) -> None:
    """One run without interruption; one that kills itself, and is resumed. Compares them."""
    with tempfile.TemporaryDirectory() as folder:
        whole, _ = train(Path(folder, "whole.pickle"), workers)
        print(f"uninterrupted: {whole}")
        checkpoints = Path(folder, "killed.pickle")
        # The standard library's resource tracker clears up after the dead, and says so.
        command = [sys.executable, "-W", "ignore:resource_tracker", __file__]
        command += ["--checkpoint", str(checkpoints), "--kill-at", str(STEPS // 2)]
        command += ["--workers", str(workers)]
        if subprocess.run(command).returncode != -signal.SIGKILL:
            raise SystemExit("the run that should be killed was not")
        print(f"killed:        at step {STEPS // 2}")
        resumed, table = train(checkpoints, workers)
        print(f"resumed:       {resumed}")
    if resumed != whole:
        raise SystemExit("the interruption has changed a batch")
    print(f"the same batches, from the first to the last\n\n{table}")


# No `if __name__ == "__main__":`, since minloader's workers do not import this script.
parser = argparse.ArgumentParser(description="A mixture of texts, killed and resumed.")
parser.add_argument("--workers", type=int, default=2, help="worker processes (0: none)")
parser.add_argument("--checkpoint", type=Path, help="one run, with checkpoints in this file")
parser.add_argument("--kill-at", type=int, default=0, metavar="STEP", help="SIGKILL itself then")
args = parser.parse_args()
if args.checkpoint is None:
    demonstrate(args.workers)
else:
    print(*train(args.checkpoint, args.workers, args.kill_at), sep="\n")
