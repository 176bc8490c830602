"""Templated requests: word problems, writing, role play, reasoning, extraction, knowledge, code. All our own."""

from __future__ import annotations

import random
from collections.abc import Callable

NAMES = (
    "Ada Omar Lena Bruno Mei Tariq Sofia Jonas Priya Kwame Elif Mateo Hana Igor Zoe Rafael Nadia Felix Amara Viktor "
    "Leila Oscar Yuki Dalia Pavel Ines Kofi Marta Ravi Greta Samir Clara Hugo Noor Tomas Freya Anton Bea Luca Wen"
).split()
ITEMS = (
    "apples pencils stickers marbles books eggs cookies shells stamps coins balloons tickets bricks candles buttons "
    "lemons muffins postcards seeds photos ribbons bottles toys cards beads oranges plates cups notebooks flowers"
).split()
PLACES = "market library school garden bakery museum farm workshop harbor theater park station".split()
CONTAINERS = "boxes bags baskets jars crates drawers shelves trays".split()
VEHICLES = "train bus bicycle boat truck car tram ferry".split()
PROFESSIONS = (
    "a ship's captain|a beekeeper|a patient piano teacher|a tired detective|a lighthouse keeper|a baker in a small "
    "village|an astronaut on the way to Mars|a medieval blacksmith|a friendly librarian|a chess coach|a park ranger|a "
    "museum guide|a radio host|a watchmaker|a mountain guide|a sceptical scientist|a time traveller from 1850|a wise "
    "grandmother|a robot gardener|a travel agent|a football coach|a nurse on a night shift|a court painter|a dragon "
    "who "
    "dislikes gold"
).split("|")
TOPICS = (
    "photosynthesis|the water cycle|compound interest|the printing press|black holes|vaccines|the French Revolution|"
    "supply and demand|plate tectonics|machine learning|the human heart|inflation|electric cars|the Roman Empire|"
    "recycling|sleep|jazz|volcanoes|the internet|coral reefs|gravity|antibiotics|the Silk Road|evolution|nuclear power|"
    "poetry|chess openings|the moon|glaciers|democracy|bread baking|batteries|migration of birds|the immune system|"
    "satellites|trade unions|the metric system|solar panels|fermentation|earthquakes|DNA|the stock market|rainbows|"
    "cryptography|public libraries|urban parks|the Industrial Revolution|tides|lenses|semiconductors|maps|opera"
).split("|")
THINGS = (
    "an old bicycle|a lost letter|a broken clock|a garden in winter|the last train home|a talking cat|a secret door|"
    "the first day of school|a storm at sea|a forgotten song|a small red umbrella|the empty theater|a long bridge|a "
    "jar "
    "of honey|two neighbours who never spoke|a map without names|a lighthouse in fog|a bakery at dawn|a chess game in "
    "a "
    "park|a robot that learns to paint|a night without stars|the smell of rain|a borrowed coat|a mountain village"
).split("|")
EVENTS = (
    "a team meeting next Tuesday|a birthday party for a colleague|a delayed delivery|a refund for a damaged lamp|a "
    "neighbourhood clean-up|a lost library book|a job interview|a broken heating system|a school trip to a museum|a "
    "change of address|a charity run|an overdue invoice|a new office policy on remote work|a cancelled flight|a book "
    "club"
).split("|")
STYLES = (
    "in a cheerful tone|in a formal tone|for a ten-year-old|in the style of a newspaper report|with short sentences|"
    "with one surprising detail|in plain language|with a calm and friendly voice|with a touch of humour|in three "
    "sentences"
).split("|")
CODE_TASKS = (
    "reverses the words of a sentence|checks whether a string is a palindrome|returns the n-th Fibonacci number|counts "
    "the vowels in a text|merges two sorted lists|removes duplicates from a list but keeps the order|finds the second "
    "largest number in a list|converts Celsius to Fahrenheit|computes the greatest common divisor of two numbers|"
    "flattens a nested list|groups words by their first letter|checks whether brackets are balanced|rotates a list by "
    "k "
    "places|finds the longest common prefix of some strings|counts how often each word occurs in a file|validates an "
    "email address in a simple way|computes the median of a list|transposes a matrix|implements binary "
    "search|generates "
    "all primes below n|sums the digits of a number|parses a CSV line without a library|caches the results of another "
    "function|splits a list into chunks of size n|finds all pairs of numbers with a given sum|converts an integer to "
    "Roman numerals|computes a moving average|sorts dictionaries by a key|encodes a string with run-length encoding|"
    "finds the shortest path in a grid"
).split("|")
LANGUAGES = "Python Python Python Python JavaScript Java C Rust Go".split()


def _math(r: random.Random) -> str:
    a, b = r.sample(NAMES, 2)
    item, other = r.sample(ITEMS, 2)
    place, box, vehicle = r.choice(PLACES), r.choice(CONTAINERS), r.choice(VEHICLES)
    n, m, k = r.randint(3, 60), r.randint(2, 12), r.randint(2, 9)
    big = r.randint(5, 40) * 10
    price, percent = r.randint(1, 19), r.choice((5, 10, 15, 20, 25, 30, 40, 50))
    forms = (
        f"{a} has {n} {item}. {b} has {k} times as many {item} as {a}. How many {item} do they have together?",
        f"{a} buys {m} {item} for ${price} each and {k} {other} for ${price + k} each. How much does {a} pay in total?",
        f"There are {n + 10} {item} at the {place}. {a} takes {m}, and {b} takes twice as many as {a}. If someone then "
        f"brings {k} more, how many {item} are there?",
        f"A {vehicle} travels at {big} kilometers an hour for {k} hours, then at {big // 2} kilometers an hour for {m} "
        "hours. How far does it travel?",
        f"{a} packs {n * k} {item} into {box} that hold {k} {item} each. {b} then empties {min(m, n - 1)} of the "
        f"{box}. "
        f"How many {box} are still full?",
        f"A shop sells {item} at ${big} a box. During a sale the price is {percent}% lower. How much do {k} boxes cost "
        "during the sale?",
        f"{a} reads {n} pages on Monday, {m} more pages on Tuesday than on Monday, and half as many on Wednesday as on "
        f"Monday and Tuesday together. A book has {big + 200} pages. How many pages are left?",
        f"{a} earns ${price + 8} an hour and works {k} hours a day, {r.randint(3, 6)} days a week. How much does {a} "
        "earn "
        f"in {m} weeks?",
        f"{a} is {m} years older than {b}. In {k} years, {b} will be {n + k}. How old is {a} now?",
        f"{a} shares {n * k} {item} equally among {k} friends. Each friend gives {min(2, n)} of them to {b}. How many "
        f"{item} does {b} get, and how many does each friend keep?",
        f"A tank at the {place} holds {big * 10} liters. It is filled at {m * 5} liters a minute and leaks {m} liters "
        "a "
        "minute. How long does it take to fill the empty tank? Round to the nearest minute.",
        f"A recipe for {k} people needs {m * 50} grams of flour and {m} eggs. {a} cooks for {k * 3} people. How much "
        "flour and how many eggs are needed?",
        f"{a} saves ${price} every day. After {n} days, {a} spends a quarter of the savings on {item}. How much is "
        "left?",
        f"In a class of {big // 10 * 5} pupils, {percent}% take the {vehicle} to school and the rest walk. How many "
        "pupils "
        "walk?",
        f"A garden is {n} meters long and {m} meters wide. Fence costs ${price} a meter. How much does it cost to "
        "fence it "
        f"and to plant {k} {item} per square meter at $1 each?",
        f"{a}, {b} and a friend collect {item}. {a} collects {n}, {b} collects {m} fewer than {a} plus {k * 4}, and "
        "the "
        f"friend collects the average of the two. How many {item} does the friend collect?",
        f"{a} starts with ${big}. {a} spends ${price} on {item} and then half of the rest on {other}. How much money "
        "is "
        "left?",
        f"A machine makes {n} {item} every {k} minutes. How many {item} does it make in {m} hours?",
        f"A {vehicle} leaves at {r.randint(6, 11)}:{r.choice(('05', '10', '25', '40'))} and arrives {k * 15 + 10} "
        "minutes "
        f"later. It then waits {m * 3} minutes and needs the same time for the way back. When is it back?",
        f"What is {n} * {m} + {big} - {k}? Show your steps.",
    )
    ending = r.choice(("", "", "", "", " Explain your reasoning step by step.", " Think step by step."))
    return r.choice(forms) + ending


def _writing(r: random.Random) -> str:
    style, thing, event, topic = r.choice(STYLES), r.choice(THINGS), r.choice(EVENTS), r.choice(TOPICS)
    forms = (
        f"Write a short story about {thing} {style}.",
        f"Write an email about {event} {style}.",
        f"Compose a poem of {r.choice(('four', 'eight', 'twelve'))} lines about {thing}.",
        f"Write a blog post introduction about {topic} {style}.",
        f"Draft a speech of one minute about {topic} {style}.",
        f"Write a product description for {thing} {style}.",
        f"Write the opening paragraph of a novel that begins with {thing}.",
        f"Write a diary entry about {thing} {style}.",
        f"Give me five titles for an article about {topic}.",
        f"Write a polite reply to a message about {event}.",
        f"Describe {thing} without using the word 'the'.",
        f"Write a dialogue between {r.choice(NAMES)} and {r.choice(NAMES)} about {topic} {style}.",
        f"Make an outline for an essay on {topic} and write its first section {style}.",
        f"Plan {r.choice(('a weekend', 'three days', 'a rainy afternoon'))} around {topic} for a family with two "
        "children.",
    )
    return r.choice(forms)


def _roleplay(r: random.Random) -> str:
    who, topic, thing = r.choice(PROFESSIONS), r.choice(TOPICS), r.choice(THINGS)
    forms = (
        f"Pretend to be {who}. Explain {topic} to a visitor.",
        f"You are {who}. Tell me about the strangest day of your life, with {thing} in it.",
        f"Act as {who} and answer: what do people get wrong about {topic}?",
        f"Imagine you are {who}. Give advice to {r.choice(NAMES)}, who worries about {r.choice(EVENTS)}.",
        f"Speak as {who} would and describe {thing}.",
        f"Take the role of {who} in an interview about {topic}. Write three questions and your answers.",
    )
    return r.choice(forms)


def _reasoning(r: random.Random) -> str:
    a, b, c, d = r.sample(NAMES, 4)
    x, y = r.sample(ITEMS, 2)
    n, topic = r.randint(2, 9), r.choice(TOPICS)
    forms = (
        f"{a} is taller than {b}. {b} is taller than {c}. {d} is shorter than {c}. Who is the tallest and who is the "
        "shortest?",
        f"{a} stands to the left of {b}. {c} stands to the right of {b}. {d} stands between {a} and {b}. In which "
        "order "
        "do they stand?",
        f"All {x} in the {r.choice(PLACES)} are red. {a} holds something red. Can we be sure that it is one of the "
        f"{x}? "
        "Explain.",
        f"If it rains, {a} takes the {r.choice(VEHICLES)}. {a} did not take it today. Did it rain? Explain your "
        "answer.",
        f"There are {n} boxes with {x} and {n + 2} boxes with {y}. How many boxes must {a} open to be sure to see "
        "both?",
        f"{a} says that {b} lies. {b} says that {c} lies. {c} says that {a} and {b} both lie. Who tells the truth?",
        f"Compare {topic} and {r.choice(TOPICS)}. Name two things that they have in common and two that they do not.",
        f"Give two arguments for and two against spending more public money on {topic}.",
        f"What would change in daily life if {topic} did not exist? Reason step by step.",
        f"{a} finished before {b} but after {c}. {d} finished last. List the four in the order in which they finished.",
        f"A room has {n} lamps and {n} switches in another room. Describe how {a} finds out which switch belongs to "
        "which "
        "lamp with as few visits as possible.",
    )
    return r.choice(forms)


def _extraction(r: random.Random) -> str:
    people = r.sample(NAMES, 3)
    rows = [(p, r.randint(18, 79), r.choice(PLACES), r.randint(10, 990), r.choice(ITEMS)) for p in people]
    text = " ".join(
        r.choice(
            (
                f"{p}, {age}, came to the {place} and bought {item} for ${paid}.",
                f"At the {place}, {p} (aged {age}) paid ${paid} for some {item}.",
                f"{p} is {age} years old, works at the {place} and sold {item} worth ${paid}.",
            )
        )
        for p, age, place, paid, item in rows
    )
    asks = (
        "List all names and ages in the text below as JSON.",
        "Extract every amount of money from the text and add them up.",
        "Make a table with the columns name, age, place and amount from this text.",
        "Who is the oldest person in the text below? Answer with the name only.",
        "Turn the text into a bulleted list, one line for each person.",
        "Which places are named in the following text? Give them in alphabetical order.",
    )
    return f"{r.choice(asks)}\n\n{text}"


def _knowledge(r: random.Random) -> str:
    topic, other = r.sample(TOPICS, 2)
    forms = (
        f"Explain {topic} {r.choice(STYLES)}.",
        f"What are the main causes and effects connected with {topic}?",
        f"What should a beginner know about {topic}? Give {r.randint(3, 7)} points.",
        f"How does {topic} relate to {other}?",
        f"Give a short history of {topic}.",
        f"What are common misunderstandings about {topic}?",
        f"Write {r.randint(3, 6)} quiz questions with answers about {topic}.",
        f"Describe an experiment or activity that shows something about {topic}.",
        f"Why does {topic} matter today? Answer {r.choice(STYLES)}.",
        f"Summarize what is known about {topic} in {r.randint(2, 6)} sentences.",
    )
    return r.choice(forms)


def _coding(r: random.Random) -> str:
    task, language = r.choice(CODE_TASKS), r.choice(LANGUAGES)
    extra = r.choice(
        (
            "",
            "",
            " Add a docstring and an example.",
            " Explain how it works.",
            " Do not use any library.",
            " Include three tests.",
            " Handle empty input.",
            " State its time complexity.",
        )
    )
    form = r.choice(
        (
            "Write a {} function that {}.",
            "Implement a function in {} that {}.",
            "Show me {} code that {}.",
            "How would you write a {} program that {}?",
        )
    )
    return form.format(language, task) + extra


TEMPLATES: dict[str, tuple[Callable[[random.Random], str], int]] = {
    "math": (_math, 12000),
    "writing": (_writing, 3000),
    "roleplay": (_roleplay, 1500),
    "reasoning": (_reasoning, 2500),
    "extraction": (_extraction, 2000),
    "knowledge": (_knowledge, 2500),
    "coding": (_coding, 1500),
}
"""Category -> generator of one prompt and how many to make."""
