"""Files that people write: what is refused, and how it is said."""

import pytest

from piper_kernels.errors import ConfigError, require
from piper_kernels.strict_model import (
    Fraction,
    PositiveFloat,
    PositiveInt,
    StrictModel,
    digest_of,
    digest_to_int,
)


class Wheel(StrictModel):
    diameter_m: PositiveFloat
    wear: Fraction = 0.0


class Cart(StrictModel):
    name: str
    wheels: tuple[Wheel, ...]
    spare: Wheel | None = None
    loads: dict[str, Wheel] | None = None
    curve: tuple[tuple[PositiveInt, Fraction], ...] = ()

    def model_post_init(self, _: object) -> None:
        require(len(self.wheels) < 5, "Cart", "wheels", "be at most 4", len(self.wheels))


GOOD = '{"name": "c", "wheels": [{"diameter_m": 1, "wear": 0.5}], "curve": [[1, 0.5], [2, 1]]}'


def test_strict_model_round_trip() -> None:
    cart = Cart.from_json(GOOD)
    assert cart.wheels[0].diameter_m == 1.0
    assert cart.curve == ((1, 0.5), (2, 1.0))
    assert Cart.from_json(cart.to_json()) == cart
    made = Cart(name="c", wheels=(Wheel(diameter_m=1, wear=0.5),), curve=((1, 0.5), (2, 1.0)))
    assert made == cart
    assert made.digest() == cart.digest() != made.replace(name="d").digest()


def test_strict_model_save_and_load(tmp_path) -> None:
    path = tmp_path / "cart.json"
    cart = Cart.from_json(GOOD)
    cart.save(path)
    assert Cart.load(path) == cart
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"Cart: path must be a readable text file, got .*cart"):
        Cart.load(path)
    with pytest.raises(ConfigError, match="No such file"):
        Cart.load(tmp_path / "nowhere.json")


def test_strict_model_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Cart.from_json(GOOD).name = "other"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            GOOD.replace("wear", "waer"),
            r"f.json: wheels.0.waer must be a field of Wheel, got 0.5. ",
        ),
        (GOOD.replace("wear", "waer"), r"Did you mean 'wear'\?"),
        ('{"wheels": []}', r"f.json: name must be given, got nothing. Add it: a Cart cannot be"),
        (GOOD.replace("0.5}", "1.5}"), r"f.json: wheels.0.wear must be less than or equal to 1"),
        (GOOD.replace(": 1,", ": -1,"), r"wheels.0.diameter_m must be greater than 0, got -1\."),
        (GOOD.replace(": 1,", ": NaN,"), r"wheels.0.diameter_m must be a finite number, got nan"),
        (GOOD.replace(": 1,", ': "1",'), r"wheels.0.diameter_m must be a valid number, got '1'"),
        (GOOD.replace(": 1,", ": true,"), r"wheels.0.diameter_m must be a valid number, got True"),
        (GOOD.replace("[1, 0.5]", "[1.5, 0.5]"), r"curve.0.0 must be a valid integer.* got 1.5"),
        (GOOD.replace('"name": "c"', '"name": "c", "name": "d"'), "name must be given once"),
        (GOOD[:-1], r"f.json: text must be JSON, got .* Look at line 1, column \d+"),
        ("[1]", r"f.json: text must be an object, got \[1\]"),
        (
            '{"name": "c", "wheels": [], "spare": {"diameter": 2}}',
            r"spare.diameter must be a field of Wheel, got 2. Did you mean 'diameter_m'\?",
        ),
        (
            '{"name": "c", "wheels": [], "loads": {"a": {"diameter_m": 2, "wera": 1}}}',
            r"loads.a.wera must be a field of Wheel, got 1. Did you mean 'wear'\?",
        ),
        (
            '{"name": "c", "wheels": [' + ", ".join(['{"diameter_m": 1}'] * 5) + "]}",
            r"f.json: Cart: wheels must be at most 4, got 5\.",
        ),
    ],
)
def test_from_json_instructs(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Cart.from_json(text, source="f.json")


def test_construction_instructs() -> None:
    with pytest.raises(ConfigError, match=r"^Wheel: diameter_m must be greater than 0, got 0\.$"):
        Wheel(diameter_m=0)
    with pytest.raises(ConfigError, match=r"Wheel: wera must be a field.* Did you mean 'wear'\?"):
        Wheel(diameter_m=1, wera=0)
    with pytest.raises(ConfigError, match=r"Wheel: wear must be less than or equal to 1, got 2"):
        Wheel(diameter_m=1).replace(wear=2)


def test_digest_of_separates_parts() -> None:
    assert digest_of("ab", "c") != digest_of("a", "bc")
    assert digest_of("ab") == digest_of(b"ab")
    assert len(digest_of()) == 32


def test_digest_to_int_fits_int64() -> None:
    assert digest_to_int("f" * 32) == 2**63 - 1
    assert digest_to_int("0" * 32) == 0
    assert digest_to_int("0" * 15 + "2" + "f" * 16) == 1
