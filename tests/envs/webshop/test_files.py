"""The published files, in both forms: what is wrong in one is named with its line; the cache is kept and mended."""

from __future__ import annotations

import gzip
import json
import threading

import pytest

from agentfly.envs.webshop import catalogue as catalogues
from agentfly.envs.webshop.catalogue import open_catalogue
from agentfly.envs.webshop.files import locate, read_items
from agentfly.envs.webshop.goals import price_of
from agentfly.envs.webshop.kept import open_files, products_of
from agentfly.envs.webshop.products import read_record
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
            "'Attributes' must be a list of texts",
        ),
        (
            "items_shuffle_1000.json",
            '[{"asin": "B1", "name": "x", "customization_options": {"c": [1]}}]',
            "its option 'c' must be a list",
        ),
        ("documents.jsonl", '{"id": "B1", "product": {"asin": "B1", "name": "x"}}\n\n{broken\n', "line 3 cannot be read"),
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
        ("items_ins_v2_1000.json", {"attributes": "soft"}, "its 'attributes' must be a list of texts"),
        ("items_ins_v2_1000.json", {"instruction": 3}, "its 'instruction' must be a string"),
        ("items_ins_v2_1000.json", {"instruction_attributes": [{}]}, "its 'instruction_attributes' must be a list of texts"),
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
    with pytest.raises(DataError, match="after # comes the number"):
        locate(f"{tmp_path}#many")
    with pytest.raises(DataError, match="no catalogue is called 'generate'"):
        open_catalogue("generate")


def test_what_was_built_is_used_again_and_mended_when_damaged(folder, cache, monkeypatch):
    built = []
    from agentfly.envs.webshop import kept

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


def test_products_are_kept_up_to_a_number(folder, monkeypatch):
    from agentfly.envs.webshop import kept

    monkeypatch.setattr(kept, "NUM_KEPT", 2)
    products, _ = open_files(locate(str(folder)))
    assert [product.title for product in products] == [f"Mug {n}" for n in range(5)]
    assert len(products._kept) == 2
    assert products[-1].title == "Mug 4"
    with pytest.raises(IndexError):
        products[5]


def test_an_unknown_product_is_refused(corner):
    with pytest.raises(ConfigError, match="has no product 'B999'"):
        corner.product("B999")
