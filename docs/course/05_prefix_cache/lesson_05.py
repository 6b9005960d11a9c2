"""Lesson 5: blocks whose tokens another sequence begins with, too, are not computed again."""

from nanovllm import LLM, SamplingParams, demo_model
from nanovllm.core.sequence import Sequence
from nanovllm.kv.block_manager import BlockManager

PROMPTS = {
    "A": [10, 11, 12, 13, 14, 15, 16, 17, 18, 19],
    "B": [10, 11, 12, 13, 14, 15, 16, 17, 50],
    "C": [10, 11, 12, 13, 60, 61, 62, 63, 64],
    "D": [10, 11, 12, 13, 14, 15, 16, 17],
}
SYSTEM = "Answer in one sentence, as if to a friend who has never seen an engine. "


def run() -> list[tuple[str, list[int], int]]:
    """Return the name of each sequence in turn, its block table and how many blocks it found."""
    pool = BlockManager(num_blocks=8, block_size=4)
    story = []
    for number, (name, token_ids) in enumerate(PROMPTS.items()):
        seq = Sequence(number, token_ids, SamplingParams())
        hit = pool.match_prefix(seq)
        pool.allocate_blocks(seq, seq.num_tokens, hit)
        pool.publish(seq, seq.num_tokens)  # the step that computes the prompt is done
        story.append((name, list(seq.kv.block_table), hit.num_blocks))
    return story


def cached_tokens(llm: LLM, prompt: str) -> tuple[int, int]:
    """Return how many tokens a prompt has, and how many of them were not computed."""
    output = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)[0]
    return len(output.prompt_token_ids or ()), output.num_cached_tokens or 0


def main() -> None:
    for name, table, num_hits in run():
        blocks = [PROMPTS[name][start : start + 4] for start in range(0, len(PROMPTS[name]), 4)]
        print(f"{name}: {blocks}")
        print(f"   table {table}, the first {num_hits} from the cache")

    llm = LLM(
        demo_model.MODEL, device="cpu", dtype="float32", max_model_len=128, kvcache_block_size=4
    )
    for question in ("What is a block?", "What is a block table?", "Why?"):
        total, cached = cached_tokens(llm, SYSTEM + question)
        print(f"{question!r}: {total} tokens, {cached} of them from the cache")


if __name__ == "__main__":
    main()
