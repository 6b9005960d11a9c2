"""Slots of adapters: how many run at once, who goes first, and that none starves."""

from tests.lora.fake_adapters import AdapterEngine, adapter


def test_an_adapter_that_always_has_requests_starves_no_other() -> None:
    engine = AdapterEngine(max_loras=1, max_num_seqs=4, num_blocks=64)
    for _ in range(3):
        engine.add([1, 2], max_tokens=6, ignore_eos=True, adapter=adapter(0))
    other = engine.add([1, 2], max_tokens=4, ignore_eos=True, adapter=adapter(1))
    for _ in range(30):
        engine.add([1, 2], max_tokens=6, ignore_eos=True, adapter=adapter(0))
        engine.step()
    assert other.is_finished
    engine.run()


def test_the_model_alone_and_adapters_with_a_slot_pass_one_that_waits() -> None:
    engine = AdapterEngine(max_loras=1, max_num_seqs=4, num_blocks=64)
    engine.add([1, 2], max_tokens=8, ignore_eos=True, adapter=adapter(0))
    waits = engine.add([1, 2], max_tokens=1, adapter=adapter(1))
    plain = engine.add([1, 2], max_tokens=1)
    engine.step()
    engine.step()
    assert plain.is_finished
    assert waits.table_idx is None
    assert [*engine.adapters._room] == [waits]
    engine.run()


def test_prefixes_are_of_one_adapter() -> None:
    engine = AdapterEngine(max_loras=2, num_blocks=64)
    text = [1, 2, 3, 4, 0, 1]
    hits = []
    for used in (None, adapter(0), adapter(1), adapter(0), None):
        seq = engine.add(text, max_tokens=1, adapter=used)
        engine.run()
        hits.append(seq.num_cached_tokens)
    assert hits == [0, 0, 0, 4, 4]


def test_the_least_recently_used_adapter_leaves_its_slot() -> None:
    engine = AdapterEngine(max_loras=2, num_blocks=64)
    for number in (0, 1, 0, 2, 0):
        engine.add([1, 2], max_tokens=1, adapter=adapter(number))
        engine.run()
    assert engine.worker.num_loaded == 3
    assert [*engine.adapters.slots.slots] == [adapter(2).digest, adapter(0).digest]


def test_a_later_request_does_not_pass_an_earlier_one_of_its_adapter() -> None:
    """Symptom: the step that admits the claimant of their slot also admits the later one, while the
    earlier one is in the waiting room.
    """
    engine = AdapterEngine(max_loras=2, max_num_seqs=8, num_blocks=64)
    engine.add([1, 2], max_tokens=20, ignore_eos=True, adapter=adapter(0))
    ends = engine.add([1, 2], max_tokens=6, ignore_eos=True, adapter=adapter(1))
    engine.step()
    claimant = engine.add([1, 2], max_tokens=2, ignore_eos=True, adapter=adapter(2))
    engine.step_until(lambda: engine.adapters._claims == {adapter(0).digest: claimant})
    earlier = engine.add([1, 2], max_tokens=2, ignore_eos=True, adapter=adapter(0))
    engine.step_until(lambda: ends.is_finished)
    assert [*engine.adapters._room] == [claimant, earlier]
    later = engine.add([1, 2], max_tokens=2, ignore_eos=True, adapter=adapter(0))
    engine.step()
    assert engine.admitted[-3:] == [claimant.seq_id, earlier.seq_id, later.seq_id]
    engine.run()


def test_a_request_that_came_back_gives_way_to_an_earlier_one_of_its_adapter() -> None:
    """It is in the queue, behind one that has no table row, when the earlier one comes to wait."""
    engine = AdapterEngine(max_loras=1, max_num_seqs=2, num_blocks=64)
    first = engine.add([1, 2], max_tokens=3, ignore_eos=True, adapter=adapter(0))
    engine.add([1, 2], max_tokens=40, ignore_eos=True)
    late = engine.add([1, 2], max_tokens=2, ignore_eos=True, adapter=adapter(1), priority=1)
    engine.step_until(lambda: first.is_finished)
    plain = engine.add([1, 2], max_tokens=3, ignore_eos=True)
    engine.step_until(lambda: plain.is_finished)
    assert [*engine.adapters._recalled.values()] == [late]
    others = [adapter(0), adapter(1), None]
    seqs = [engine.add([1, 2], max_tokens=3, ignore_eos=True, adapter=used) for used in others]
    engine.step()
    assert [*engine.adapters._room] == [seqs[1]]
    assert [*engine.adapters._recalled.values()] == [late]
    engine.run()
    assert engine.admitted[-4:] == [seq.seq_id for seq in (*seqs, late)]
