"""The word lists that the generated catalogue is made of: kinds of wares, their materials and features, and who makes them.

Plain data, read by `generate.py`. A kind has a department, a name and the plural that people ask for, materials, features
(which become attributes), uses, options with their values, the range of its price in dollars, and what it may look like.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ADJECTIVES = (
    *(
        "classic",
        "modern",
        "rustic",
        "everyday",
        "handmade",
        "compact",
        "vintage",
        "premium",
        "simple",
        "elegant",
        "cozy",
        "sturdy",
    ),
)
PATTERNS = (*("striped", "plaid", "floral", "solid", "herringbone", "geometric", "ribbed", "quilted", "textured", "two tone"),)
# The same lists for what is eaten or put on the skin, word for word and each word once: every draw falls on the same place, and
# titles that differ go on to differ.
_EDIBLE = {"compact": "fresh", "vintage": "traditional", "cozy": "tasty", "sturdy": "wholesome"}
_FOOD_LOOKS = ("golden", "crisp", "glossy", "hearty", "crunchy", "speckled", "bronzed", "dusted", "coarse", "mottled")
_TEA_LOOKS = ("twisted", "curled", "floral", "rolled", "wiry", "crinkled", "silvery", "feathery", "crisp", "folded")
_CREAM_LOOKS = ("glossy", "silky", "floral", "solid", "velvety", "pearly", "smooth", "milky", "satiny", "translucent")
_SOAP_LOOKS = ("striped", "marbled", "floral", "solid", "swirled", "geometric", "ribbed", "speckled", "textured", "two tone")
_FOR_EATING = tuple(_EDIBLE.get(word, word) for word in ADJECTIVES)
_FOR_SKIN = tuple("soothing" if word == "sturdy" else word for word in ADJECTIVES)


@dataclass(frozen=True, slots=True)
class Ware:
    """`sort`: what its materials are sorts of, for those that nothing can be "made of"; then they stand before this word."""

    department: str
    path: str
    name: str
    plural: str
    materials: tuple[str, ...]
    features: tuple[str, ...]
    uses: tuple[str, ...]
    options: tuple[str, ...]
    low: int
    high: int
    adjectives: tuple[str, ...] = ADJECTIVES
    patterns: tuple[str, ...] = PATTERNS
    sort: str = ""


# Values of options; a product offers some of them.
OPTIONS: dict[str, tuple[str, ...]] = {
    "color": (
        *("black", "white", "navy blue", "forest green", "burgundy", "charcoal", "mustard yellow", "teal", "lavender", "coral"),
        *("sky blue", "olive", "ivory", "dusty pink", "copper", "slate", "purple", "beige", "turquoise", "maroon"),
    ),
    "size": ("x-small", "small", "medium", "large", "x-large", "xx-large", "3x-large"),
    "shoe size": ("6", "6.5", "7", "7.5", "8", "8.5", "9", "10", "11", "12"),
    "bed size": ("twin", "full", "queen", "king", "california king"),
    "rug size": ("2 ft x 3 ft", "3 ft x 5 ft", "4 ft x 6 ft", "5 ft x 7 ft", "8 ft x 10 ft"),
    "capacity": ("8 ounce", "12 ounce", "16 ounce", "20 ounce", "32 ounce"),
    "pack": ("pack of 1", "pack of 2", "pack of 3", "pack of 6", "pack of 12"),
    "flavor": (
        "vanilla",
        "sea salt",
        "cinnamon",
        "ginger",
        "maple",
        "blueberry",
        "hazelnut",
        "smoky paprika",
        "honey",
        "mango",
    ),
    "scent": ("eucalyptus", "jasmine", "sandalwood", "vanilla", "bergamot", "fig", "cedar", "unscented"),
    "length": ("3 feet", "6 feet", "10 feet", "15 feet", "25 feet"),
    "storage": ("64 gb", "128 gb", "256 gb", "512 gb"),
    "style": ("with lid", "without lid", "with handle", "gift box"),
    "height": ("12 inch", "18 inch", "24 inch", "30 inch"),
    "firmness": ("plush", "medium firm", "firm"),
}

MAKERS = (
    *(
        "Alderwick",
        "Brightmoor",
        "Calloway",
        "Dunmere",
        "Eastfell",
        "Fernhollow",
        "Galeford",
        "Hartwell",
        "Inkwood",
        "Juniper Lane",
    ),
    *(
        "Kestrel",
        "Larkspur",
        "Millbrook",
        "Northgate",
        "Oakhurst",
        "Pinecrest",
        "Quillon",
        "Ravensby",
        "Stillwater",
        "Thornbury",
    ),
    *(
        "Umberly",
        "Valemont",
        "Westholm",
        "Yarrow",
        "Zephyr House",
        "Amberline",
        "Bluestem",
        "Cobblecroft",
        "Driftwell",
        "Emberly",
    ),
)
_WASH, _SKIN = ("machine washable", "easy care"), ("fragrance free", "cruelty free", "paraben free")
_FOOD = ("gluten free", "low sodium", "non gmo", "plant based", "no artificial colors", "high fiber", "nut free", "low sugar")
_NUTS = tuple("dairy free" if feature == "nut free" else feature for feature in _FOOD)
_TECH = ("fast charging", "high speed", "plug and play", "energy efficient", "noise reduction", "water resistant")


def _ware(
    where: str, names: str, materials: str, features: tuple[str, ...], uses: str, options: str, low: int, high: int, **more: Any
) -> Ware:
    """The tables below are easier to read with commas than with quotes."""
    department, path = (part.strip() for part in where.split("|"))
    name, plural = names.split(",")
    parts = (tuple(part.strip() for part in text.split(",")) for text in (materials, uses, options))
    made_of, used_for, offered = parts
    return Ware(department, path, name, plural.strip(), made_of, features, used_for, offered, low, high, **more)


_WOMEN = "fashion | Clothing, Shoes & Jewelry › Women › Clothing ›"
_MEN = "fashion | Clothing, Shoes & Jewelry › Men › Clothing ›"
_HOME = "garden | Home & Kitchen ›"
_CARE = "beauty | Beauty & Personal Care ›"
_ELECTRONICS = "electronics | Electronics ›"
_GROCERY = "grocery | Grocery & Gourmet Food ›"
_SPORTS = "sports | Sports & Outdoors ›"
_DESK = "office | Office Products ›"
_PETS = "pets | Pet Supplies ›"

WARES: tuple[Ware, ...] = (
    _ware(
        f"{_WOMEN} Sweaters › Cardigans",
        "cardigan,women's cardigans",
        "merino wool,cotton,cashmere,alpaca",
        (*_WASH, "long sleeve", "button closure", "loose fit", "side pockets"),
        "daily wear,the office,cool evenings",
        "color,size",
        24,
        90,
    ),
    _ware(
        f"{_WOMEN} Dresses › Casual",
        "wrap dress,women's dresses",
        "linen,viscose,cotton,jersey",
        (*_WASH, "short sleeve", "elastic waist", "v neck", "tummy control"),
        "summer parties,daily wear,travel",
        "color,size",
        22,
        110,
    ),
    _ware(
        f"{_WOMEN} Active › Leggings",
        "yoga leggings,women's leggings",
        "nylon,bamboo,cotton",
        ("high waist", "moisture wicking", "four way stretch", "squat proof", "hidden pocket", *_WASH),
        "the gym,running,yoga",
        "color,size",
        15,
        60,
    ),
    _ware(
        f"{_MEN} Shirts › Button-Down",
        "oxford shirt,men's shirts",
        "cotton,linen,flannel,chambray",
        (*_WASH, "wrinkle free", "slim fit", "long sleeve", "button closure", "stretch fabric"),
        "work,weddings,daily wear",
        "color,size",
        18,
        75,
    ),
    _ware(
        f"{_MEN} Jackets › Lightweight",
        "rain jacket,men's jackets",
        "nylon,waxed cotton,polyester",
        ("water resistant", "zipper closure", "packable hood", "inner pocket", "windproof shell"),
        "hiking,commuting,travel",
        "color,size",
        35,
        160,
    ),
    _ware(
        f"{_MEN} Shoes › Boots",
        "chelsea boots,men's boots",
        "suede,leather,waxed leather",
        ("slip resistant", "arch support", "memory foam", "rubber sole", "pull tab"),
        "daily wear,winter,work",
        "color,shoe size",
        45,
        220,
    ),
    _ware(
        f"{_WOMEN} Shoes › Sandals",
        "walking sandals,women's sandals",
        "leather,cork,woven canvas",
        ("arch support", "open toe", "adjustable strap", "rubber sole", "quick drying"),
        "the beach,travel,long walks",
        "color,shoe size",
        20,
        120,
    ),
    _ware(
        f"{_HOME} Bedding › Sheets",
        "bed sheet set,bed sheets",
        "bamboo,percale cotton,linen,sateen",
        (*_WASH, "deep pocket", "wrinkle free", "hypoallergenic fabric", "breathable weave"),
        "hot sleepers,guest rooms,winter",
        "color,bed size",
        25,
        150,
    ),
    _ware(
        f"{_HOME} Bedding › Blankets & Throws",
        "throw blanket,throw blankets",
        "fleece,chunky knit,sherpa,wool",
        (*_WASH, "super soft", "double sided", "fade resistant", "tassel edge"),
        "the sofa,the living room,camping",
        "color,rug size",
        15,
        95,
    ),
    _ware(
        f"{_HOME} Home Décor › Area Rugs",
        "area rug,area rugs",
        "jute,wool,polypropylene,cotton",
        ("spot clean", "non slip backing", "low pile", "stain resistant", "hand woven"),
        "the living room,the hallway,dining rooms",
        "color,rug size",
        30,
        420,
    ),
    _ware(
        f"{_HOME} Furniture › Living Room › Tables",
        "side table,side tables",
        "walnut wood,bamboo,steel,marble",
        ("easy assembly", "space saving", "storage shelf", "scratch resistant", "solid wood legs"),
        "small rooms,the bedroom,the patio",
        "color,height",
        40,
        260,
    ),
    _ware(
        f"{_HOME} Kitchen › Drinkware › Mugs",
        "coffee mug,coffee mugs",
        "stoneware,porcelain,enamel,glass",
        ("dishwasher safe", "microwave safe", "lead free glaze", "comfortable grip", "heat resistant"),
        "the office,camping,gifts",
        "color,capacity,style",
        8,
        40,
    ),
    _ware(
        f"{_HOME} Kitchen › Cookware › Skillets",
        "frying pan,frying pans",
        "cast iron,ceramic,carbon steel",
        ("non stick", "oven safe", "induction ready", "easy clean", "stay cool handle"),
        "eggs,camping,everyday cooking",
        "color,pack",
        20,
        130,
    ),
    _ware(
        f"{_HOME} Lighting › Lamps",
        "table lamp,table lamps",
        "ceramic,brass,frosted glass,wood",
        ("dimmable light", "touch control", "linen shade", "usb port", "energy efficient"),
        "the bedroom,reading,the study",
        "color,height",
        22,
        140,
    ),
    _ware(
        f"{_HOME} Bedding › Pillows",
        "bed pillow,bed pillows",
        "memory foam,down,latex,bamboo",
        ("hypoallergenic fabric", "cooling gel", "neck support", "removable cover", "machine washable"),
        "side sleepers,back sleepers,travel",
        "bed size,firmness",
        18,
        110,
    ),
    _ware(
        f"{_CARE} Skin Care › Moisturizers",
        "face cream,face creams",
        "aloe,shea butter,oat,rosehip",
        (*_SKIN, "dermatologist tested", "long lasting", "oil free", "fast absorbing"),
        "dry skin,sensitive skin,cold weather",
        "scent,capacity",
        9,
        65,
        adjectives=_FOR_SKIN,
        patterns=_CREAM_LOOKS,
    ),
    _ware(
        f"{_CARE} Hair Care › Shampoos",
        "shampoo,shampoos",
        "argan,coconut,tea tree,oat",
        (*_SKIN, "sulfate free", "color safe", "volumizing formula"),
        "dry hair,fine hair,curly hair",
        "scent,capacity,pack",
        7,
        40,
        adjectives=_FOR_SKIN,
        patterns=_CREAM_LOOKS,
    ),
    _ware(
        f"{_CARE} Bath › Candles & Soaps",
        "bar soap,bar soaps",
        "olive,goat milk,oatmeal,shea butter",
        (*_SKIN, "hand cut", "palm oil free", "gentle cleansing"),
        "sensitive skin,daily use,gifts",
        "scent,pack",
        5,
        30,
        adjectives=_FOR_SKIN,
        patterns=_SOAP_LOOKS,
    ),
    _ware(
        f"{_ELECTRONICS} Headphones › On-Ear",
        "wireless headphones,wireless headphones",
        "aluminum,leatherette,recycled plastic",
        (*_TECH, "hands free", "foldable design", "long battery life"),
        "travel,the office,running",
        "color",
        25,
        280,
    ),
    _ware(
        f"{_ELECTRONICS} Accessories › Cables",
        "charging cable,charging cables",
        "braided nylon,silicone,rubber",
        (*_TECH, "tangle free", "gold plated connector", "reinforced ends"),
        "the car,the desk,travel",
        "color,length,pack",
        6,
        35,
    ),
    _ware(
        f"{_ELECTRONICS} Computers › Storage",
        "portable drive,portable drives",
        "aluminum,recycled plastic",
        (*_TECH, "shock resistant", "compact size", "hardware encryption"),
        "backups,photographers,students",
        "color,storage",
        20,
        240,
    ),
    _ware(
        f"{_ELECTRONICS} Audio › Speakers",
        "bluetooth speaker,bluetooth speakers",
        "fabric,bamboo,aluminum",
        (*_TECH, "stereo sound", "dust proof", "built in microphone"),
        "the shower,picnics,the kitchen",
        "color,storage",
        18,
        190,
    ),
    _ware(
        f"{_GROCERY} Snacks › Nuts & Seeds",
        "roasted almonds,roasted almonds",
        "whole,slivered,smoked,honey glazed",
        _NUTS,
        "lunch boxes,hiking,parties",
        "flavor,pack",
        5,
        45,
        adjectives=_FOR_EATING,
        patterns=_FOOD_LOOKS,
        sort="almonds",
    ),
    _ware(
        f"{_GROCERY} Snacks › Granola",
        "granola,granola cereals",
        "oat,quinoa,coconut,pumpkin seed",
        (*_FOOD,),
        "breakfast,lunch boxes,camping",
        "flavor,pack",
        5,
        40,
        adjectives=_FOR_EATING,
        patterns=_FOOD_LOOKS,
    ),
    _ware(
        f"{_GROCERY} Beverages › Tea",
        "loose leaf tea,loose leaf teas",
        "green,black,rooibos,oolong",
        ("caffeine free", "fair trade", "hand picked", "non gmo", "no artificial flavors"),
        "mornings,gifts,cold brewing",
        "flavor,pack",
        6,
        48,
        adjectives=_FOR_EATING,
        patterns=_TEA_LOOKS,
        sort="tea",
    ),
    _ware(
        f"{_SPORTS} Outdoor › Backpacks",
        "hiking backpack,hiking backpacks",
        "ripstop nylon,canvas,recycled polyester",
        ("water resistant", "padded straps", "laptop sleeve", "hip belt", "ventilated back"),
        "day trips,school,travel",
        "color,size",
        28,
        180,
    ),
    _ware(
        f"{_SPORTS} Fitness › Yoga",
        "yoga mat,yoga mats",
        "cork,natural rubber,foam",
        ("non slip backing", "extra thick", "carry strap", "easy clean", "odor free"),
        "beginners,home workouts,travel",
        "color,length",
        15,
        95,
    ),
    _ware(
        f"{_SPORTS} Outdoor › Bottles",
        "water bottle,water bottles",
        "stainless steel,glass,aluminum",
        ("leak proof", "double wall insulation", "bpa free", "dishwasher safe", "wide mouth"),
        "the gym,hiking,school",
        "color,capacity,style",
        10,
        55,
    ),
    _ware(
        f"{_DESK} Desk Accessories › Organizers",
        "desk organizer,desk organizers",
        "bamboo,mesh steel,acrylic",
        ("space saving", "easy assembly", "phone stand", "non slip feet", "two drawers"),
        "the home office,students,craft rooms",
        "color,height",
        12,
        70,
    ),
    _ware(
        f"{_DESK} Writing › Notebooks",
        "lined notebook,lined notebooks",
        "recycled paper,leather bound,linen bound",
        ("acid free paper", "lay flat binding", "elastic closure", "numbered pages", "bleed proof"),
        "journaling,students,meetings",
        "color,pack",
        6,
        38,
    ),
    _ware(
        f"{_PETS} Dogs › Beds",
        "dog bed,dog beds",
        "memory foam,fleece,cotton,canvas",
        ("removable cover", "machine washable", "non slip backing", "chew resistant", "raised rim"),
        "older dogs,puppies,the car",
        "color,size",
        22,
        140,
    ),
    _ware(
        f"{_PETS} Cats › Toys",
        "cat tree,cat trees",
        "sisal,plush,carpet,pine wood",
        ("easy assembly", "scratch resistant", "hanging toy", "wide base", "cozy cave"),
        "small rooms,kittens,large cats",
        "color,height",
        28,
        170,
    ),
)
