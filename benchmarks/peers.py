"""The loaders that are measured, all as one thing: iterated once a window, they give batches of int64 [B, 2].

Each sample's first eight bytes are its number; a batch says number and length of each, so that what was delivered can be
checked. All read the same bytes from the same server, with the same bytes of cache:

- salience: the Loader over the tar shards of `salience pack`, plans from a Trace, no loader workers.
- LitData: StreamingDataset over chunks of its own format, from `s3://` with the server as its endpoint; its cache is a
  folder. One thing is changed, through its own `register_downloader`: its S3 client refuses plain http, ours allows it.
- WebDataset: the same tar shards over http (it runs curl), cached in a folder by its FileCache. Put together from its own
  parts, since `WebDataset(...)` looks at the size of its cache every 30 seconds only, which would be no limit here;
  this one looks before every download.
"""

# pyright: reportMissingTypeStubs=false, reportAttributeAccessIssue=false

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

import salience
from rivals import POLICIES

BATCH = 32
SETTINGS: dict[str, tuple[dict[str, int], ...]] = {
    "litdata": ({"workers": 1, "ahead": 2}, {"workers": 2, "ahead": 2}, {"workers": 2, "ahead": 8}),
    "webdataset": ({"workers": 2, "keep": 1}, {"workers": 4, "keep": 1}, {"workers": 4, "keep": 0}),
}
"""Three settings of each, of which the best counts. LitData with 3 or 4 workers comes to a standstill with so small a cache."""


def number(data: Any) -> Tensor:
    """What a sample says of itself."""
    return torch.tensor([int.from_bytes(data[:8], "little"), len(data)])


def ours(url: str, cache: int, *, policy: str, trace: str, windows: int) -> Iterable[Tensor]:
    source = salience.Source(f"{url}/shards")
    return salience.Loader(
        source, BATCH, epochs=windows, select=salience.Trace(trace), decode=number, views=True,
        cache=cache, cache_policy=POLICIES[policy],
    )  # fmt: skip


def _data(path: str) -> dict[str, bytes]:
    return {"data": Path(path).read_bytes()}


def _number_of_item(item: dict[str, bytes]) -> Tensor:
    return number(item["data"])


def _number_of_tar(sample: dict[str, bytes]) -> Tensor:
    return number(sample["bin"])


def write_chunks(files: Sequence[Path], out: Path, size: int) -> None:
    """The files in LitData's format, in their order."""
    import litdata

    litdata.optimize(_data, [str(file) for file in files], output_dir=str(out), chunk_bytes=size, num_workers=1)


def litdata(url: str, cache: int, folder: Path, *, workers: int, ahead: int) -> Iterable[Tensor]:
    import litdata
    from litdata.streaming.downloader import S3Downloader, register_downloader

    class OverHttp(S3Downloader):
        def _get_store(self, bucket: str) -> Any:
            from obstore.store import S3Store

            if not hasattr(self, "_store"):
                self._store = S3Store(
                    bucket, endpoint=url, region="any", skip_signature=True,
                    client_options={"allow_http": True, "timeout": "200s", "pool_max_idle_per_host": "32"},
                )  # fmt: skip
            return self._store

    register_downloader("s3://", OverHttp, overwrite=True)
    logging.getLogger("litdata").setLevel(logging.ERROR)
    os.environ |= {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", "AWS_DEFAULT_REGION": "any"}
    data = litdata.StreamingDataset(
        "s3://lit", cache_dir=str(folder), shuffle=True, max_cache_size=cache,
        max_pre_download=ahead, storage_options={"endpoint_url": url}, transform=_number_of_item,
    )  # fmt: skip
    return litdata.StreamingDataLoader(data, batch_size=BATCH, num_workers=workers, persistent_workers=True)


def webdataset(
    url: str, cache: int, folder: Path, *, workers: int, keep: int, shards: Sequence[str]
) -> Iterable[Tensor]:
    import webdataset as wds
    from webdataset.cache import FileCache, StreamingOpen
    from webdataset.filters import pipelinefilter
    from webdataset.tariterators import group_by_keys, tar_file_expander

    pipeline = wds.DataPipeline(
        wds.SimpleShardList([f"{url}/shards/{shard}" for shard in shards]),
        wds.split_by_worker,
        wds.shuffle(len(shards)),
        FileCache(str(folder), cache_size=cache, cache_cleanup_interval=0) if keep else StreamingOpen(),
        pipelinefilter(tar_file_expander)(),
        pipelinefilter(group_by_keys)(),
        wds.shuffle(4 * BATCH),
        wds.map(_number_of_tar),
        wds.batched(BATCH, collation_fn=torch.stack),
    )
    return DataLoader(pipeline, batch_size=None, num_workers=workers, persistent_workers=True)
