"""Seeds: the published generator, its range, and values that must never change."""

from hypothesis import given
from hypothesis import strategies as st

from dpex.schedule.seeding import epoch_key, mix64, ticket_seed

MASK64 = (1 << 64) - 1
GOLDEN_GAMMA = 0x9E3779B97F4A7C15
SIGNED = st.integers(-(1 << 63), (1 << 63) - 1)


def test_mix64_is_splitmix64() -> None:
    """Published outputs of SplitMix64 from seed 1234567."""
    state, outputs = 1234567, []
    for _ in range(5):
        state = (state + GOLDEN_GAMMA) & MASK64
        outputs.append(mix64(state))
    assert outputs == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@given(SIGNED, st.integers(0, 1 << 20), st.integers(0, 1 << 40))
def test_seeds_fit_every_generator(base_seed: int, epoch: int, number: int) -> None:
    key = epoch_key(base_seed, epoch)
    seed = ticket_seed(key, number)
    assert 0 <= key <= MASK64
    assert 0 <= seed < 1 << 63
    assert (key, seed) == (epoch_key(base_seed, epoch), ticket_seed(key, number))


def test_a_signed_base_seed_is_its_64_bits() -> None:
    assert epoch_key(-1, 3) == epoch_key(MASK64, 3)


def test_batches_of_many_epochs_and_close_seeds_share_no_seed() -> None:
    seeds = {
        ticket_seed(epoch_key(base, epoch), number) for base in range(8) for epoch in range(20) for number in range(500)
    }
    assert len(seeds) == 8 * 20 * 500
