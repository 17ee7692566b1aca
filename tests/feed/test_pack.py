"""Packing: what lies where in the shards, what others' tars turn into, and that anything else is refused in a sentence."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from salience.errors import ConfigError, DataError, SalienceError, StateError
from salience.feed.headers import TAR_BLOCK_BYTES, TAR_END, header, header_size, members, padded
from salience.feed.index import FILE, Index
from salience.feed.pack import File, PackedSample, Packing, PackSettings, fill, list_files, pack, samples_of
from salience.feed.tars import check, index_shards, index_tars

LONG = "long" * 40 + ".jpg"
SMALL = PackSettings(shard_size=8192)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """40 files of two classes, with what makes names hard."""
    root = tmp_path / "data"
    for i in range(36):
        write(root / ("cat", "dog")[i % 2] / f"{i:02}.jpg", bytes([i]) * (i * 37))
    write(root / "cat" / "00.txt", b"a caption")
    write(root / "cat" / "v1.final.png", b"dots")
    write(root / "cat" / "v1_final.png", b"underscore")
    write(root / "dog" / "noext", b"none")
    write(root / "dog" / LONG, b"long")
    write(root / "dog" / ".hidden", b"no")
    return root


def write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def tar(path: Path, entries: dict[str, bytes], form: int = tarfile.GNU_FORMAT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=form) as archive:
        for name, data in entries.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def data_of(root: Path, index: Index, i: int) -> bytes:
    with (root / index.path(i)).open("rb") as shard:
        shard.seek(int(index.offset[i]))
        return shard.read(int(index.size[i]))


def snapshot(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in root.iterdir()}


# ---------------------------------------------------------------- packing


def test_the_index_leads_to_the_bytes_the_class_and_the_path_of_every_file(folder: Path, tmp_path: Path):
    pack(folder, tmp_path / "out", SMALL)
    index = Index.load(tmp_path / "out" / FILE)
    wanted = {f.path for f in list_files(folder)} - {"cat/00.txt"}
    assert {index.names[i] for i in range(len(index))} == wanted
    for i in range(len(index)):
        data = (folder / index.names[i]).read_bytes()
        assert data_of(tmp_path / "out", index, i) == data
        assert index.check[i] == xxh3_64_intdigest(data)
        assert index.classes[index.label[i]] == index.names[i].partition("/")[0]
    assert len(index.shards) > 5
    assert all(size <= 8192 for size in index.shard_sizes)


def test_tarfile_reads_whole_webdataset_samples_with_their_class(folder: Path, tmp_path: Path):
    pack(folder, tmp_path / "out", SMALL)
    found: dict[str, dict[str, bytes]] = {}
    for shard in sorted((tmp_path / "out").glob("*.tar")):
        with tarfile.open(shard, "r:") as archive:
            for info in archive:
                assert (info.mtime, info.uid, info.gid, info.mode) == (0, 0, 0, 0o644)
                folder_, _, base = info.name.rpartition("/")
                key, _, suffix = base.partition(".")
                data = archive.extractfile(info)
                assert data is not None
                assert suffix not in found.setdefault(f"{folder_}/{key}", {})
                found[f"{folder_}/{key}"][suffix] = data.read()
    assert len(found) == 40
    assert found["cat/00"] == {"jpg": b"", "txt": b"a caption", "cls": b"0"}
    assert found["dog/noext"] == {"bin": b"none", "cls": b"1"}
    assert found["dog/" + LONG[:-4]] == {"jpg": b"long", "cls": b"1"}
    assert sorted(found[key]["png"] for key in ("cat/v1_final", "cat/v1_final-2")) == [b"dots", b"underscore"]


def test_the_seed_alone_decides_the_order_and_a_contiguous_range_mixes_classes(folder: Path, tmp_path: Path):
    for name, seed, jobs in (("a", 0, 1), ("b", 0, 3), ("c", 1, 3)):
        pack(folder, tmp_path / name, PackSettings(shard_size=8192, seed=seed), jobs=jobs)
    one = snapshot(tmp_path / "a")
    assert one.keys() == snapshot(tmp_path / "b").keys()
    assert all(data == one[name] for name, data in snapshot(tmp_path / "b").items())
    assert snapshot(tmp_path / "c")["shard-000000.tar"] != one["shard-000000.tar"]
    assert set(Index.load(tmp_path / "a" / FILE).label[:10]) == {0, 1}


def test_files_without_directories_have_no_classes(tmp_path: Path):
    write(tmp_path / "flat" / "1.jpg", b"x")
    write(tmp_path / "flat" / "1.json", b"{}")
    index = pack(tmp_path / "flat", tmp_path / "out", SMALL)
    assert (index.classes, index.label.tolist()) == ((), [-1])
    with tarfile.open(tmp_path / "out" / "shard-000000.tar") as archive:
        assert archive.getnames() == ["1.jpg", "1.json"]


def test_offsets_beyond_4_and_8_GiB_are_right(tmp_path: Path):
    sizes = [5 << 30, 3, 9 << 30, 7]
    samples = [PackedSample(f"a/{i}", 0, (File(f"a/{i}.bin", size, 0),)) for i, size in enumerate(sizes)]
    packing = Packing(settings=PackSettings(), shards=fill(samples, 1 << 40), classes=("a",))
    index = packing.index([np.ones(4, np.uint64)])
    at = 0
    with (tmp_path / "big.tar").open("wb") as out:  # headers where the plan says, holes between them
        for sample in samples:
            for name, size in sample.members():
                out.seek(at)
                out.write(header(name, size))
                at += header_size(name) + padded(size)
        out.seek(at)
        out.write(TAR_END)
    assert (tmp_path / "big.tar").stat().st_size == index.shard_sizes[0] > 14 << 30
    with tarfile.open(tmp_path / "big.tar") as archive:
        read = [(info.offset_data, info.size) for info in archive if info.name.endswith(".bin")]
    assert read == list(zip(index.offset.tolist(), sizes, strict=True))
    again, _ = index_shards(tmp_path, checksums=False)
    assert again.offset.tolist() == index.offset.tolist()
    again.save(tmp_path / FILE)
    assert Index.load(tmp_path / FILE).offset.tolist() == index.offset.tolist()


# ---------------------------------------------------------------- going on


def test_missing_shards_are_written_and_whole_ones_kept(folder: Path, tmp_path: Path):
    index = pack(folder, tmp_path / "whole", SMALL)
    wanted = snapshot(tmp_path / "whole")
    out = tmp_path / "out"
    out.mkdir()
    for name in ("pack.json", "shard-000001.tar"):  # what a kill leaves: a whole shard with its checksums, half of one
        (out / name).write_bytes(wanted[name])
    index.check[index.shard == 1].tofile(out / "shard-000001.check")
    (out / "shard-000002.tar.part").write_bytes(b"half")
    kept = (out / "shard-000001.tar").stat().st_ino
    pack(folder, out, SMALL)
    assert snapshot(out) == wanted
    assert (out / "shard-000001.tar").stat().st_ino == kept


def test_an_unreadable_file_is_named_and_leaves_no_index(folder: Path, tmp_path: Path):
    (folder / "dog" / "99.jpg").symlink_to("/proc/self/mem")  # a regular file whose reading fails, also for root
    with pytest.raises(DataError, match=r"99\.jpg cannot be read"):
        pack(folder, tmp_path / "out", SMALL)
    assert not (tmp_path / "out" / FILE).exists()
    (folder / "dog" / "99.jpg").unlink()
    (folder / "dog" / "98.jpg").symlink_to("nowhere")
    with pytest.raises(DataError, match=r"98\.jpg cannot be read: No such file"):
        pack(folder, tmp_path / "other", SMALL)


def test_a_finished_packing_is_left_as_it_is_and_a_lost_shard_said(folder: Path, tmp_path: Path):
    out = tmp_path / "out"
    pack(folder, out, SMALL)
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    assert len(pack(folder, out, SMALL)) == 40
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == before
    (out / "shard-000002.tar").unlink()
    with pytest.raises(StateError, match=r"shard-000002\.tar is gone"):
        pack(folder, out, SMALL)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (PackSettings(shard_size=9000), "shard_size was 8192 and is 9000"),
        (PackSettings(shard_size=8192, seed=3), "seed was 0"),
    ],
)
def test_other_settings_do_not_mix_with_what_was_begun(folder: Path, tmp_path: Path, settings: PackSettings, said: str):
    pack(folder, tmp_path / "out", SMALL)
    with pytest.raises(StateError, match=said):
        pack(folder, tmp_path / "out", settings)


def test_a_changed_file_a_foreign_file_and_a_foreign_shard_are_refused(folder: Path, tmp_path: Path):
    out = tmp_path / "out"
    write(out / "mine.txt", b"mine")
    with pytest.raises(StateError, match=r"mine\.txt for one"):
        pack(folder, out, SMALL)
    (out / "mine.txt").unlink()
    pack(folder, out, SMALL)
    (out / FILE).unlink()
    with pytest.raises(StateError, match="is not the shard that pack wrote"):
        pack(folder, out, SMALL)
    os.utime(folder / "cat" / "02.jpg", ns=(1, 1))
    with pytest.raises(StateError, match="files to pack have changed"):
        pack(folder, out, SMALL)


def test_a_shard_size_below_one_file_an_empty_folder_and_out_inside_dir_are_one_sentence_each(
    folder: Path, tmp_path: Path
):
    def refused(kind: type[SalienceError], said: str, data: Path, out: Path, size: int = 8192) -> None:
        with pytest.raises(kind, match=said):
            pack(data, out, PackSettings(shard_size=size))
        assert not out.exists()

    (tmp_path / "empty").mkdir()
    write(tmp_path / "split" / "train" / "a" / "1.jpg", b"x")
    write(tmp_path / "split" / "val" / "a" / "1.jpg", b"x")
    write(tmp_path / "cls" / "a" / "1.cls", b"0")
    refused(ConfigError, "alone takes .* larger --shard-size", folder, tmp_path / "out", 2000)
    refused(DataError, "holds no files to pack", tmp_path / "empty", tmp_path / "out")
    refused(DataError, "There is no folder", tmp_path / "nothing", tmp_path / "out")
    refused(ConfigError, "is inside", folder, folder / "out")
    refused(DataError, "splits train, val, which must not mix", tmp_path / "split", tmp_path / "out")
    refused(DataError, r"remove \.cls files", tmp_path / "cls", tmp_path / "out")


def test_text_alone_is_data_and_beside_an_image_it_travels():
    files = [File(path, 1, 0) for path in ("a/1.jpg", "a/1.json", "a/1.png", "a/2.json", "a/2.txt")]
    samples, classes = samples_of(files)
    assert [[file.path for file in sample.files] for sample in samples] == [
        ["a/1.jpg", "a/1.json"], ["a/1.png"], ["a/2.txt", "a/2.json"],
    ]  # fmt: skip
    assert ([sample.key for sample in samples], classes) == (["a/1", "a/1-2", "a/2"], ("a",))


def test_the_index_has_the_mode_of_its_shards(folder: Path, tmp_path: Path):
    code = (
        "import os, sys; from salience.feed.pack import PackSettings, pack\n"
        "os.umask(0o027); pack(sys.argv[1], sys.argv[2], PackSettings(shard_size=8192))"
    )
    subprocess.run([sys.executable, "-c", code, str(folder), str(tmp_path / "out")], check=True)
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in (tmp_path / "out").iterdir()}
    assert {FILE, "pack.json", "shard-000000.tar"} < set(modes)
    assert set(modes.values()) == {"0o640"}


@pytest.mark.parametrize("name", ["pack.json.part", "shard-000000.tar.part", "shard-000000.check.part"])
def test_a_link_that_lies_in_the_way_is_not_written_through(name: str, folder: Path, tmp_path: Path):
    pack(folder, tmp_path / "out", SMALL)
    for path in (tmp_path / "out").iterdir():
        if not (name.startswith("shard") and path.name == "pack.json"):
            path.unlink()
    write(tmp_path / "elsewhere", b"precious")
    (tmp_path / "out" / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="cannot be written"):
        pack(folder, tmp_path / "out", SMALL)
    assert (tmp_path / "elsewhere").read_bytes() == b"precious"


# ---------------------------------------------------------------- shards of others


def test_an_index_made_from_packed_shards_is_the_one_that_pack_wrote(folder: Path, tmp_path: Path):
    index = pack(folder, tmp_path / "out", SMALL)
    again, skipped = index_shards(tmp_path / "out")
    assert skipped == 0
    assert (again.shards, again.classes) == (index.shards, index.classes)
    for column in ("shard_sizes", "shard", "offset", "size", "check", "label"):
        assert np.array_equal(getattr(again, column), getattr(index, column)), column


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_names_and_places_are_those_that_tarfile_reads(form: int, tmp_path: Path):
    names = ["a/1.jpg", "d" * 90 + "/" + "e" * 60 + "/2.jpg", "./b/3.jpg"]
    if form != tarfile.USTAR_FORMAT:
        names += ["c/" + "x" * 300 + ".jpg", "ü/4.jpg"]
    path = tar(tmp_path / "x.tar", {name: name.encode() * 40 for name in names}, form)
    with tarfile.open(path) as archive:
        wanted = [(info.name.removeprefix("./"), info.offset_data, info.size) for info in archive]
    with path.open("rb") as file:
        assert [member[:3] for member in members(file, "x.tar")] == wanted


def test_a_pax_size_counts_where_the_header_has_none(tmp_path: Path):
    record = b"size=700\n"
    record = b"%d %s" % (len(record) + 3, record)
    extra, real = tarfile.TarInfo("x"), tarfile.TarInfo("a/1.jpg")
    extra.type, extra.size = tarfile.XHDTYPE, len(record)
    blocks = (
        extra.tobuf(),
        record.ljust(TAR_BLOCK_BYTES, b"\0"),
        real.tobuf(),
        bytes(1024),
        header("a/2.jpg", 0),
        TAR_END,
    )
    (tmp_path / "x.tar").write_bytes(b"".join(blocks))
    with (tmp_path / "x.tar").open("rb") as file:
        assert [(m.name, m.offset, m.size) for m in members(file, "x.tar")] == [
            ("a/1.jpg", 1536, 700),
            ("a/2.jpg", 3072, 0),
        ]


@pytest.mark.parametrize(
    ("said", "classes", "labels"),
    [
        ((b"2", b"0\n"), ("0", "1", "2"), [2, 0]),
        ((b"dog", b"cat"), ("cat", "dog"), [1, 0]),
        ((b"1", b"0"), ("a", "b"), [1, 0]),  # as the directories say, so those are their names
        ((None, b"0"), ("0",), [-1, 0]),
        ((None, None), ("a", "b"), [1, 0]),
    ],
)
def test_labels_come_from_the_class_member_or_the_directory(said, classes, labels, tmp_path: Path):
    entries: dict[str, bytes] = {}
    for name, text in zip(("b/1", "a/2"), said, strict=True):
        entries |= {f"{name}.json": b"{}"} | ({} if text is None else {f"{name}.cls": text}) | {f"{name}.jpg": b"data"}
    tar(tmp_path / "x.tar", entries)
    index, _ = index_shards(tmp_path)
    assert (index.classes, index.label.tolist()) == (classes, labels)
    assert [index.names[i] for i in range(2)] == ["b/1.jpg", "a/2.jpg"]
    assert data_of(tmp_path, index, 1) == b"data"


def test_one_tar_is_indexed_by_its_headers(tmp_path: Path):
    index = index_tars([tar(tmp_path / "x.tar", {"a/1.jpg": b"data"})])
    assert (index.shards, index.check.tolist(), data_of(tmp_path, index, 0)) == (("x.tar",), [0], b"data")


def test_folders_links_and_hidden_files_are_counted_and_left_out(tmp_path: Path):
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        for name, kind in (("a", tarfile.DIRTYPE), ("a/l.jpg", tarfile.SYMTYPE), ("a/._1.jpg", tarfile.REGTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            archive.addfile(info)
        archive.addfile(tarfile.TarInfo("a/1.jpg"))
    index, skipped = index_shards(tmp_path, checksums=False)
    assert (len(index), index.names[0], skipped, index.check.tolist()) == (1, "a/1.jpg", 3, [0])


@pytest.mark.parametrize("name", ["../x.jpg", "a/../../x.jpg", "/etc/x.jpg"])
def test_names_that_lead_outside_are_refused(name: str, tmp_path: Path):
    tar(tmp_path / "x.tar", {"a/1.jpg": b"1", name: b"2"})
    with pytest.raises(DataError, match="leads outside"):
        index_shards(tmp_path)


def test_compressed_cut_off_damaged_and_missing_tars_are_one_sentence_each(tmp_path: Path):
    def refused(said: str, name: str, data: bytes | None) -> None:
        path = tmp_path / name
        if data is not None:
            path.write_bytes(data)
        with pytest.raises(DataError, match=said):
            index_shards(tmp_path)
        path.unlink(missing_ok=True)

    good = tar(tmp_path / "y" / "good.tar", {"a/1.jpg": b"1" * 2000, "a/2.jpg": b"2" * 2000}).read_bytes()
    refused("holds no .tar files", "x.tar", None)
    refused(r"x\.tar\.gz is compressed", "x.tar.gz", good)
    refused(r"x\.tar is compressed \(gzip\)", "x.tar", b"\x1f\x8b" + bytes(1000))
    refused("is cut off", "x.tar", good[:3000])
    refused("is cut off", "x.tar", good[: 2 * 2560])
    refused("no header at byte 2,560", "x.tar", good[:2560] + b"rubbish" * 700)
    refused("There are no samples", "x.tar", TAR_END)
    (tmp_path / "x.tar").symlink_to("nowhere")
    refused(r"x\.tar cannot be read: No such file", "x.tar", None)


def with_checksum(block: bytes) -> bytes:
    """A header whose checksum fits, whatever its fields say."""
    return block[:148] + b"%06o\0 " % (sum(block[:148]) + sum(block[156:]) + 8 * ord(" ")) + block[156:]


@pytest.mark.parametrize(
    "size",
    [
        b"-0000001000\0",
        b"-0000000001\0",
        b"+0000000001\0",
        b"0000_000001\0",
        b"0o000000001\0",
        b"\xff" * 12,
        b"\x80" + b"\xff" * 11,
    ],
)
@pytest.mark.parametrize("kind", [b"0", b"L", b"x"])
def test_a_size_that_no_member_can_have_is_damage(size: bytes, kind: bytes, tmp_path: Path):
    head = header("a/2.jpg", 0)
    wrong = with_checksum(head[:124] + size + head[136:156] + kind + head[157:])
    (tmp_path / "x.tar").write_bytes(header("a/1.jpg", 4) + b"data".ljust(512, b"\0") + wrong + TAR_END)
    with pytest.raises(DataError, match=r"no header at byte 1,024|is cut off"):
        index_shards(tmp_path)


@pytest.mark.parametrize(
    "records",
    [
        b"5012 size=" + b"9" * 5000 + b"\n",
        b"1" * 5000 + b" size=1\n",
        b"9999999 size=1\n",
        b"0 size=1\n",
        b"-9 size=1\n",
        b"11 size=-1\n",
        b"no record",
        b" 8 size=1\n",
    ],
    ids=lambda records: records[:12].decode(),
)
def test_a_pax_header_that_makes_no_sense_is_damage(records: bytes, tmp_path: Path):
    extra = tarfile.TarInfo("x")
    extra.type, extra.size = tarfile.XHDTYPE, len(records)
    data = extra.tobuf() + records.ljust(padded(len(records)), b"\0") + header("a/1.jpg", 0) + TAR_END
    (tmp_path / "x.tar").write_bytes(data)
    with pytest.raises(DataError, match="no header at byte 0"):
        index_shards(tmp_path)


def test_a_pax_header_of_many_records_is_read_once_and_only_what_counts_is_kept(tmp_path: Path):
    records = b"7 a=bc\n" * 149_000 + b"10 size=4\n"
    extra = tarfile.TarInfo("x")
    extra.type, extra.size = tarfile.XHDTYPE, len(records)
    data = extra.tobuf() + records.ljust(padded(len(records)), b"\0") + header("a/1.jpg", 0) + b"data".ljust(512, b"\0")
    (tmp_path / "x.tar").write_bytes(data + TAR_END)
    index, _ = index_shards(tmp_path)
    assert data_of(tmp_path, index, 0) == b"data"


# ---------------------------------------------------------------- checking


def test_a_check_finds_flipped_bytes_lost_shards_and_other_sizes(folder: Path, tmp_path: Path):
    out = tmp_path / "out"
    index = pack(folder, out, SMALL)
    assert check(out)[1] == []
    i = int(np.flatnonzero(index.size > 0)[0])
    with (out / index.path(i)).open("r+b") as shard:
        shard.seek(int(index.offset[i]))
        shard.write(b"\xff")
    (out / "shard-000003.tar").unlink()
    with (out / "shard-000004.tar").open("ab") as shard:
        shard.write(b"x")
    _, problems = check(out)
    assert len(problems) == 3
    assert problems[0] == f"{index.path(i)}: {index.names[i]!r} has other bytes than its checksum says."
    assert problems[1] == "shard-000003.tar is missing."
    assert "the index says" in problems[2]
