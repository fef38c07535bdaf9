import base64
import hashlib
import stat

import pytest

from bridle.errors import ConfigError
from bridle.server.http import (
    TOKEN_ENV,
    TOKEN_FILE,
    ApiToken,
    Auth,
    TokenRole,
    callback_secrets,
    load_tokens,
    own_token,
)

SECRET = "a-secret-of-sixteen"
OWN = ApiToken(name="operator", token="the-operators-own-token", roles=(TokenRole.ADMIN,))


def name_of(auth, headers):
    caller = auth.caller(headers)
    return None if caller is None else caller.name


def bearer(token):
    return [(b"host", b"x"), (b"authorization", f"Bearer {token}".encode())]


def test_a_token_is_read_from_the_authorization_and_the_polar_header():
    auth = Auth([ApiToken(name="trainer", token=SECRET)])
    assert name_of(auth, bearer(SECRET)) == "trainer"
    assert name_of(auth, [(b"x-polar-control-token", SECRET.encode())]) == "trainer"
    assert name_of(auth, [(b"authorization", b"bearer " + SECRET.encode())]) == "trainer"


@pytest.mark.parametrize(
    "headers",
    [[], bearer(""), bearer(SECRET + "x"), bearer("é"), [(b"authorization", SECRET.encode())]],
)
def test_unknown_credentials_are_refused(headers):
    assert Auth([ApiToken(name="trainer", token=SECRET)]).caller(headers) is None


def test_a_token_has_only_its_own_roles_and_admin_has_all():
    auth = Auth(
        [
            ApiToken(name="r", token=SECRET + "r", roles=(TokenRole.READ,)),
            ApiToken(name="a", token=SECRET + "a", roles=(TokenRole.ADMIN,)),
        ]
    )
    reader, admin = auth.caller(bearer(SECRET + "r")), auth.caller(bearer(SECRET + "a"))
    assert reader is not None
    assert admin is not None
    assert [role for role in TokenRole if reader.may(role)] == [TokenRole.READ]
    assert all(admin.may(role) for role in TokenRole)


def test_one_valid_token_among_several_is_enough():
    basic = b"Basic " + base64.b64encode(f"x:{SECRET}".encode())
    headers = [(b"x-polar-control-token", b"another-of-theirs"), (b"authorization", basic)]
    assert name_of(Auth([ApiToken(name="trainer", token=SECRET)]), headers) == "trainer"


def test_operator_token_is_created_once_in_a_private_file(tmp_path):
    made = own_token(tmp_path / "data")
    kept = tmp_path / "data" / TOKEN_FILE
    assert own_token(tmp_path / "data") == made
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert (made.name, made.roles) == ("operator", (TokenRole.ADMIN,))
    kept.write_text("short")
    with pytest.raises(ConfigError, match=r"server\.token: token: .*at least 16"):
        own_token(tmp_path / "data")


def test_tokens_of_one_owner_with_different_callback_secrets_are_refused(tmp_path):
    file = tmp_path / "tokens.toml"
    entry = '[[tokens]]\nname = "{}"\ntoken = "{}"\n'
    mine = entry.format("a", SECRET + "1") + 'callback_secret = "a-secret-of-owner-a"\n'
    file.write_text(mine + entry.format("a", SECRET + "2") + entry.format("b", SECRET + "3"))
    assert callback_secrets(load_tokens(file, {}, own=OWN)) == {"a": b"a-secret-of-owner-a"}
    another = entry.format("a", SECRET + "2") + 'callback_secret = "another-of-owner-a"\n'
    file.write_text(mine + another)
    with pytest.raises(ConfigError, match=r"tokens of owner 'a' have different callback_secrets"):
        callback_secrets(load_tokens(file, {}, own=OWN))


def test_a_callback_secret_shared_by_two_owners_is_refused(tmp_path):
    secret = "a-secret-of-owner-a"
    tokens = [
        ApiToken(name=name, token=SECRET + name, callback_secret=secret) for name in ("a", "b")
    ]
    with pytest.raises(ConfigError, match=r"owners 'a' and 'b' have the same callback_secret"):
        callback_secrets(tokens)


def test_tokens_come_from_a_file_and_from_the_environment(tmp_path):
    digest = hashlib.sha256(SECRET.encode()).hexdigest()
    file = tmp_path / "tokens.toml"
    file.write_text(f'[[tokens]]\nname = "t"\nsha256 = "{digest}"\nroles = ["read"]\n')
    tokens = load_tokens(file, {TOKEN_ENV: "another-of-sixteen\n"}, own=OWN)
    assert [token.name for token in tokens] == ["operator", "t", "environment"]
    auth = Auth(tokens)
    assert name_of(auth, bearer(SECRET)) == "t"
    assert name_of(auth, bearer("another-of-sixteen")) == "environment"
    assert load_tokens(None, {}, own=OWN) == [OWN]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[tokens]]\nname = "t"\n', "either `token` or `sha256`"),
        ('[[tokens]]\nname = "t"\ntoken = "short"\n', "at least 16"),
        ('[[tokens]]\nname = "t"\ntoken = "a-secret-of-sixteen"\nroles = ["king"]\n', "roles"),
        ("[[tokens]\n", "tokens.toml"),
    ],
)
def test_an_invalid_tokens_file_is_refused_with_the_fault(tmp_path, text, message):
    file = tmp_path / "tokens.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_tokens(file, {}, own=OWN)


def test_tokens_with_one_name_belong_to_one_tenant():
    auth = Auth([ApiToken(name="t", token=SECRET), ApiToken(name="t", token="another-of-sixteen")])
    callers = [auth.caller(bearer(token)) for token in (SECRET, "another-of-sixteen")]
    assert [one.tenant for one in callers if one is not None] == ["t", "t"]
    admin = Auth([ApiToken(name="a", token=SECRET, roles=(TokenRole.ADMIN,))]).caller(
        bearer(SECRET)
    )
    assert admin is not None
    assert admin.tenant is None


def test_repr_of_a_token_hides_its_secret():
    assert SECRET not in repr(ApiToken(name="t", token=SECRET))
