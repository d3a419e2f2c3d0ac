"""The published files, in both forms: what is wrong in one is named with its line; the cache is kept and mended."""

from __future__ import annotations

import gzip
import json
import random
import re
import threading
import zlib

import pytest

from agentfly.envs.webshop.catalogue import catalogue as catalogues
from agentfly.envs.webshop.catalogue.catalogue import open_catalogue
from agentfly.envs.webshop.catalogue.disk import open_files, products_of
from agentfly.envs.webshop.catalogue.files import locate, read_items
from agentfly.envs.webshop.catalogue.goals import price_of
from agentfly.envs.webshop.catalogue.products import read_record
from agentfly.errors import ConfigError, DataError


def record(number: int, **changes):
    return {
        "asin": f"B00000000{number}",
        "name": f"Mug {number}",
        "full_description": "A mug.",
        "small_description": ["Dishwasher safe", "Holds much"],
        "pricing": "$10.00$24.50" if number % 2 else "$1,012.99",
        "customization_options": {"Color": [{"value": " Red/Blue ", "image": None}, {"value": "Green"}], "Size": None},
        "images": ["x"],
        "category": "kitchen",
        "query": " Mugs ",
        "product_category": "Home › Mugs",
        "brand": "left out",
    } | changes


EXTRAS = {
    f"B00000000{n}": {"attributes": ["stoneware"], "instruction": f"Find me mugs {n}", "instruction_attributes": ["stoneware"]}
    for n in range(5)
}
HUMAN = {
    "B000000001": [
        {"instruction": "i want a green mug.", "instruction_attributes": ["stoneware"], "instruction_options": ["green"]},
        {"instruction": "any mug", "instruction_attributes": [], "instruction_options": []},
    ]
}


GOOD = {"items_ins_v2_1000.json": {"attributes": []}, "items_human_ins.json": [], "title_nouns.json": ["mug"]}


@pytest.fixture
def folder(tmp_path):
    """As the original's data folder: collected products, attributes and people's instructions."""
    records = [record(n) for n in range(5)] + [record(1, name="a repetition"), record(6, asin="nan"), record(7, asin="B" * 11)]
    (tmp_path / "items_shuffle_1000.json").write_text(json.dumps(records, indent=1))
    (tmp_path / "items_ins_v2_1000.json").write_text(json.dumps(EXTRAS))
    (tmp_path / "items_human_ins.json").write_text(json.dumps(HUMAN))
    return tmp_path


def test_a_folder_of_the_original_is_read(folder):
    products, index = open_files(locate(str(folder)))
    assert [product.asin for product in products] == [f"B00000000{n}" for n in range(5)]
    first, second = products[0], products[1]
    assert (first.price_tag, second.price_tag) == ("$1012.99", "$10.0 to $24.5")
    assert first.options == {"color": ("red | blue", "green")}
    assert (first.query, first.attributes) == ("mugs", ("stoneware",))
    assert 10.0 <= price_of(second) <= 24.5
    assert price_of(second) == price_of(products[1])
    assert index.search(["3"], 10) == [3]
    assert (products.counts["synthetic"], products.counts["human"]) == ([2] * 5, [0, 1, 0, 0, 0])


def test_a_checkout_of_the_original_keeps_its_files_in_a_folder(folder, tmp_path_factory):
    checkout = tmp_path_factory.mktemp("webshop")
    (checkout / "data").symlink_to(folder)
    found = locate(f"{checkout}#3")
    assert (found.items.name, found.limit) == ("items_shuffle_1000.json", 3)
    assert found.extras is not None
    assert found.human is not None
    assert len(open_files(found)[0]) == 3


def test_goals_of_both_kinds_are_made(folder):
    shop = open_catalogue(str(folder))
    texts = sorted(goal.instruction for goal in shop.goals() if goal.asin == "B000000001")
    assert [text.partition(", and price")[0] for text in texts] == [
        "Find me mugs 1 with color: green",
        "Find me mugs 1 with color: red | blue",
    ]
    (human,) = shop.goals("human")
    assert human.instruction.startswith("i want a green mug, and price lower than ")
    assert human.options == ("green",)
    assert human.price_upper > shop.price("B000000001")
    dear = next(goal for goal in shop.goals() if goal.asin == "B000000000")
    assert (dear.price_upper, "price lower" in dear.instruction) == (1_000_000, False)


def test_the_cleaned_form_gives_the_same_products(folder, tmp_path_factory):
    collected = list(products_of(locate(str(folder)), EXTRAS, HUMAN))
    other = tmp_path_factory.mktemp("cleaned")
    with gzip.open(other / "documents.jsonl.gz", "wt") as stream:
        for product in collected:
            cleaned = record(int(product.asin[-1])) | {
                "options": {name: list(values) for name, values in product.options.items()},
                "pricing": list(product.pricing),
                "Attributes": list(product.attributes),
            }
            stream.write(json.dumps({"id": product.asin, "contents": product.searched, "product": cleaned}) + "\n")
    assert list(products_of(locate(str(other)), EXTRAS, HUMAN)) == collected


def test_only_the_first_records_are_read_where_asked_for(folder):
    products, _ = open_files(locate(f"{folder}#3"))
    assert len(products) == 3
    whole, _ = open_files(locate(f"{folder / 'items_shuffle_1000.json'}"))
    assert len(whole) == 5


def test_a_record_without_a_price_costs_what_the_original_says():
    product = read_record(record(1, pricing=None))
    assert product is not None
    assert (product.price_tag, price_of(product)) == ("$100.0", 100.0)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (
            "items_shuffle_1000.json",
            '[\n{"asin": "B1", "name": "x"},\n{"asin": "B2", "na',
            "line 3: record 2 is not valid JSON",
        ),
        ("items_shuffle_1000.json", '[\n{"asin": "B1", "name": "x"}\n{"asin": "B2"}]', "line 3: record 2: ',' was expected"),
        ("items_shuffle_1000.json", '[{"asin": "B1", "name": "x"}', "record 2: ',' was expected, not the end of the file"),
        ("items_shuffle_1000.json", '{"asin": "B1"}', r"line 1: a file that begins with '\['"),
        ("items_shuffle_1000.json", "", r"line 1: a file that begins with '\['"),
        ("items_shuffle_1000.json", '[\n\n{"name": "x"}]', "line 3: product 1: it has no 'asin'"),
        ("items_shuffle_1000.json", '[{"asin": "B1"}]', "line 1: product 1: its 'name' must be a string"),
        ("items_shuffle_1000.json", "[7]", "product 1: a product is an object, not a int"),
        ("items_shuffle_1000.json", "[]", "no products in it"),
        (
            "items_shuffle_1000.json",
            '[{"asin": "B1", "name": "x", "pricing": "ten"}]',
            "its 'pricing' has no price in dollars: 'ten'",
        ),
        ("items_shuffle_1000.json", '[{"asin": "B1", "name": "x", "pricing": [NaN]}]', "has no price in dollars"),
        (
            "items_shuffle_1000.json",
            '[{"asin": "B1", "name": "x", "Attributes": "soft"}]',
            "'Attributes' must be a list of strings",
        ),
        (
            "items_shuffle_1000.json",
            '[{"asin": "B1", "name": "x", "customization_options": {"c": [1]}}]',
            "its option 'c' must be a list",
        ),
        (
            "items_shuffle_1000.json",
            '[{"asin": "B1", "name": "x"},\n{"asin": "B2", "name": "x", "options": {"color": "red"}}]',
            "line 2: product 2: its option 'color' must be a list of strings, not 'red'",
        ),
        ("items_shuffle_1000.json", '[{"asin": "B1", "name": "x"}\n]\n]', r"line 3: the file should end after '\]'"),
        ("documents.jsonl", '{"id": "B1", "product": {"asin": "B1", "name": "x"}}\n\n{broken\n', "line 3 is not valid JSON"),
        ("documents.jsonl", '{"asin": "B1", "name": "x"}\n{"asin" 3}', r"line 2 is not valid JSON: .*\(column 9\)$"),
    ],
)
def test_malformed_files_are_named_with_the_line(tmp_path, name, text, said):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=said) as error:
        open_files(locate(str(tmp_path)))
    assert name in str(error.value)


@pytest.mark.parametrize(
    ("name", "entry", "said"),
    [
        ("items_ins_v2_1000.json", 7, "attributes and instruction are an object, not 7"),
        ("items_ins_v2_1000.json", {"attributes": "soft"}, "its 'attributes' must be a list of strings"),
        ("items_ins_v2_1000.json", {"instruction": 3}, "its 'instruction' must be a string"),
        ("items_ins_v2_1000.json", {"instruction_attributes": [{}]}, "its 'instruction_attributes' must be a list of strings"),
        ("items_human_ins.json", {"instruction": "x"}, "human instructions are a list"),
        ("items_human_ins.json", [{"instruction": "x", "instruction_options": [[]]}], "'instruction_options' must be a list"),
        ("items_human_ins.json", [{"instruction": "x", "instruction_options": {"size": 3}}], "must be names and values"),
        ("title_nouns.json", [["mug"]], "nouns are a list of words"),
    ],
)
def test_a_malformed_companion_is_named_with_its_line_and_product(folder, name, entry, said):
    (folder / name).write_text(f'{{"B000000001": {json.dumps(GOOD[name])},\n "B000000002": {json.dumps(entry)}}}')
    with pytest.raises(DataError, match=f"{name}: line 2: product B000000002: .*{said}"):
        open_files(locate(str(folder)))


def test_a_key_that_is_no_text_is_refused(folder):
    (folder / "items_human_ins.json").write_text('{"B000000001": [],\n [1]: []}')
    with pytest.raises(DataError, match="items_human_ins.json: line 2: a product's id is a text"):
        open_files(locate(str(folder)))


def long_list(number: int, bad: bytes) -> tuple[bytes, int]:
    """More than one piece of text as it is read, with a fault in the name of one record; and the line of that fault."""
    records = [record(n % 10, name=f"Mug {n}", full_description="x" * 9_000) for n in range(400)]
    before, sign, after = json.dumps(records, indent=1).encode().partition(f'"name": "Mug {number}"'.encode())
    assert sign
    return before + b'"name": ' + bad + after, before.count(b"\n") + 1


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (b'"M\xffug"', "line {line}: record 301 cannot be read: its column 13 is not UTF-8 text"),
        (b"%%%", "record 301 is not valid JSON: Expecting value: line {line} column 11$"),
    ],
)
def test_a_fault_far_inside_of_a_list_is_named_with_its_own_line(tmp_path, bad, said, ending):
    data, line = long_list(300, bad)
    file = tmp_path / f"items_shuffle.json{ending}"
    file.write_bytes(gzip.compress(data) if ending else data)
    with pytest.raises(DataError, match=said.format(line=line)):
        list(read_items(file))


def test_the_column_of_a_fault_counts_from_the_lines_beginning(tmp_path):
    """In a file of one line, whose beginning is long gone when the fault is met."""
    texts = [json.dumps(record(n % 10, full_description="x" * 9_000)) for n in range(400)]
    texts[300] = '{"asin" 3}'
    file = tmp_path / "items_shuffle.json"
    file.write_text("[" + ",".join(texts) + "]")
    column = len("[" + ",".join(texts[:300]) + ',{"asin" ') + 1
    with pytest.raises(DataError, match=f"line 1: record 301 is not valid JSON: .*: line 1 column {column}$"):
        list(read_items(file))


def test_a_letter_across_the_border_of_two_pieces_is_read(tmp_path, monkeypatch):
    from agentfly.envs.webshop.catalogue import files

    monkeypatch.setattr(files, "_CHUNK", 3)
    (tmp_path / "items_shuffle.json").write_text('["é", "🏠🏠",\n "ü"]', encoding="utf-8")
    assert list(read_items(tmp_path / "items_shuffle.json")) == [(1, "é"), (1, "🏠🏠"), (2, "ü")]
    (tmp_path / "items_shuffle.json").write_bytes('["é",\n "🏠'.encode()[:-1])
    with pytest.raises(DataError, match="line 2: record 2 cannot be read: its column 3 is not UTF-8 text"):
        list(read_items(tmp_path / "items_shuffle.json"))


@pytest.mark.parametrize("name", ["items_shuffle.json.gz", "documents.jsonl.gz"])
@pytest.mark.parametrize("harm", ["cut", "damaged"])
def test_a_gzip_file_that_breaks_off_is_named_with_the_last_line(tmp_path, name, harm):
    rng = random.Random(3)
    texts = [json.dumps(record(n % 10, full_description=rng.randbytes(3_000).hex())) for n in range(400)]
    text = "\n".join(texts) if "jsonl" in name else "[\n" + ",\n".join(texts) + "\n]"
    whole = gzip.compress(text.encode())
    file, cut = tmp_path / name, len(whole) * 7 // 10
    file.write_bytes(whole[:cut] + (b"" if harm == "cut" else bytes(len(whole) - cut)))
    readable = zlib.decompressobj(31).decompress(whole[:cut])
    with pytest.raises(DataError, match="cannot be read") as error:
        list(read_items(file))
    line = int(re.search(r"gz: line (\d+)", str(error.value))[1])
    # What is damaged may give out a little nonsense, or a little less, before it is found out.
    assert abs(line - (readable.count(b"\n") + 1)) <= (0 if harm == "cut" else 8)


def test_a_file_that_is_no_gzip_file_is_refused(tmp_path):
    for name in ("items_shuffle.json.gz", "documents.jsonl.gz"):
        (tmp_path / name).write_text("[]")
        with pytest.raises(DataError, match=f"{name}: line 1.* cannot be read: .*Not a gzipped file"):
            list(read_items(tmp_path / name))


def test_half_a_surrogate_pair_is_read_as_a_question_mark(folder):
    """JSON can hold one, and collected text does."""
    broken = record(1, name="Mug \ud800", full_description="\udfff")
    (folder / "items_shuffle_1000.json").write_text(json.dumps([record(0), broken]))
    (folder / "title_nouns.json").write_text(json.dumps({"B000000001": ["mug\ud800"]}))
    products, _ = open_files(locate(str(folder)))
    assert (products[1].title, products[1].description) == ("Mug ?", "?")


def test_bytes_that_are_not_text_are_refused(tmp_path):
    (tmp_path / "documents.jsonl").write_bytes(b'{"a": "\xff\xfe"}')
    with pytest.raises(DataError, match="documents.jsonl: line 1"):
        list(read_items(tmp_path / "documents.jsonl"))
    (tmp_path / "items_shuffle.json.gz").write_bytes(gzip.compress(b'[{"asin": "B1"}]')[:-4])
    with pytest.raises(DataError, match="items_shuffle.json.gz"):
        list(read_items(tmp_path / "items_shuffle.json.gz"))


def test_a_long_list_is_read_piece_by_piece(tmp_path):
    """More than one chunk, with a record across the border and line breaks inside of records."""
    records = [record(n % 10, full_description="mug\n" * 5_000) for n in range(120)]
    file = tmp_path / "items_shuffle.json"
    file.write_text(json.dumps(records, indent=1))
    found = list(read_items(file))
    assert [item for _, item in found] == records
    lines = file.read_text().splitlines()
    assert all(lines[line - 1].strip() == "{" for line, _ in found)


def test_missing_data_says_what_is_looked_for(tmp_path):
    with pytest.raises(DataError, match="no such file or folder"):
        locate(str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match="items_shuffle_1000.json"):
        locate(str(tmp_path))
    for limit in ("many", "²", "0"):
        with pytest.raises(DataError, match="after # comes the number"):
            locate(f"{tmp_path}#{limit}")
    with pytest.raises(DataError, match="no catalogue is called 'generate'"):
        open_catalogue("generate")


@pytest.mark.parametrize("name", ["x\0/y", "x\0", "\ud800/y", "x" * 5_000, "~nobody-of-this-name/x", "x/" * 5_000])
def test_what_no_file_can_be_called_is_one_sentence(name):
    with pytest.raises(DataError, match=r"no path that a file can have|no such file or folder|no catalogue is called"):
        open_catalogue(name)
    with pytest.raises(DataError, match="no such file or folder"):
        locate(name)


def test_what_was_built_is_used_again_and_mended_when_damaged(folder, cache, monkeypatch):
    built = []
    from agentfly.envs.webshop.catalogue import disk as kept

    build = kept._build
    monkeypatch.setattr(kept, "_build", lambda files, where: (built.append(1), build(files, where)))
    for _ in range(2):
        open_files(locate(str(folder)))
    assert len(built) == 1
    (stored,) = [path for path in (cache / "webshop").iterdir() if path.is_dir()]
    weights = stored / "weights.npy"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 0xFF
    weights.write_bytes(data)
    products, _ = open_files(locate(str(folder)))
    assert len(built) == 2
    assert products[4].title == "Mug 4"


def test_changed_files_are_another_catalogue(folder):
    open_files(locate(str(folder)))
    (folder / "items_shuffle_1000.json").write_text(json.dumps([record(8), record(9)]))
    products, _ = open_files(locate(str(folder)))
    assert [product.asin for product in products] == ["B000000008", "B000000009"]


def test_many_at_once_open_one_catalogue(folder, monkeypatch):
    made = []
    make = catalogues._make
    monkeypatch.setattr(catalogues, "_make", lambda *args: (made.append(1), make(*args))[1])
    found = []
    threads = [threading.Thread(target=lambda: found.append(open_catalogue(f"{folder}#2"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(made) == 1
    assert len(found) == 8
    assert len({id(shop) for shop in found}) == 1


def test_ids_that_differ_in_capitals_alone_are_one_product(folder):
    """A click does not tell them apart."""
    rows = [record(0, asin="b0abcdefgh"), record(1, asin="B0ABCDEFGH"), record(2)]
    (folder / "items_shuffle_1000.json").write_text(json.dumps(rows))
    assert open_files(locate(str(folder)))[0].asins == ["b0abcdefgh", "B000000002"]


def test_products_are_kept_up_to_a_number(folder, monkeypatch):
    from agentfly.envs.webshop.catalogue import disk as kept

    monkeypatch.setattr(kept, "NUM_KEPT", 2)
    products, _ = open_files(locate(str(folder)))
    assert [product.title for product in products] == [f"Mug {n}" for n in range(5)]
    assert len(products._products) == 2
    assert products[-1].title == "Mug 4"
    with pytest.raises(IndexError):
        products[5]


def test_an_unknown_product_is_refused(corner):
    with pytest.raises(ConfigError, match="has no product 'B999'"):
        corner.product("B999")
