"""Solution 6."""


def batch(arrivals: list[int], lengths: list[int], max_num_seqs: int) -> list[list[int]]:
    left = list(lengths)
    running: list[int] = []
    steps: list[list[int]] = []
    waiting = list(range(len(arrivals)))
    while waiting or running:
        while waiting and arrivals[waiting[0]] <= len(steps) and len(running) < max_num_seqs:
            running.append(waiting.pop(0))
        steps.append(sorted(running))
        for number in running:
            left[number] -= 1
        running = [number for number in running if left[number]]
    return steps
