"""Questions of our own for a teacher to answer, as many as one likes.

Forms times subjects, drawn by a seed: none is a question of a benchmark. What
they are about does not matter much; that they ask for many kinds of text does.
"""

import hashlib
import random

SUBJECTS = """
tides; compost; bridges; photosynthesis; the printing press; volcanoes; honey
bees; inflation; glaciers; the moon; vaccines; solar panels; public libraries;
chess; coffee; earthquakes; the water cycle; magnets; rainbows; trade winds;
coral reefs; bicycles; sleep; memory; the steam engine; batteries; concrete;
bread; tea; the Silk Road; the Roman Empire; the Industrial Revolution; the
French Revolution; ancient Egypt; the Vikings; democracy; human rights; taxes;
supply and demand; insurance; recycling; electric cars; trains; aeroplanes;
satellites; black holes; comets; the speed of light; gravity; friction; sound
waves; lenses; microscopes; cells; DNA; evolution; bacteria; viruses; the
heart; the lungs; bones; teeth; vitamins; protein; exercise; meditation;
friendship; gardening; tomatoes; orchids; oak trees; mushrooms; wolves;
whales; owls; penguins; spiders; octopuses; migration; deserts; rainforests;
rivers; lakes; maps; clocks; calendars; money; banks; contracts; elections;
newspapers; radio; television; the internet; search engines; email; passwords;
encryption; video games; databases; compilers; operating systems; sorting
algorithms; recursion; hash tables; binary search; unit tests; version
control; machine learning; neural networks; robots; 3D printing; photography;
painting; sculpture; jazz; opera; the violin; the piano; ballet; theatre;
poetry; novels; fairy tales; translation; grammar; handwriting; mathematics;
prime numbers; fractions; triangles; probability; statistics; averages;
percentages; logic; philosophy; ethics; psychology; habits; stress; teamwork;
leadership; meetings; job interviews; public speaking; budgets; renting a
flat; cooking rice; soup; salads; chocolate; cheese; olive oil; salt;
football; swimming; running; climbing; sailing; camping; first aid; fire
safety; earthworms; clouds; snow; thunder
"""

PEOPLE = """
a teacher; a nurse; a pirate; a retired sailor; a detective; a gardener; a
young scientist; a baker; a bus driver; a queen; a farmer; an astronaut; a
librarian; a chess master; a shy musician; a football coach; a carpenter; an
old fisherman; a programmer; a museum guide; a doctor; a poet; a lighthouse
keeper; a student; a grandmother; a robot; a dragon; a talking cat; a time
traveller; a postman
"""

PLACES = """
Lisbon; Nairobi; a small village in the mountains; Kyoto; Edinburgh; Lima; an
island without roads; Istanbul; Vienna; Montreal; a harbour town; Hanoi; the
desert; Cape Town; Oslo; a train station at night; Naples; Mexico City; a
research station in Antarctica; Prague; Marrakesh; Seoul; a farm; a space
station
"""

THINGS = """
a lost umbrella; a broken clock; a letter that arrives late; an empty boat; a
red kite; a locked door; a secret recipe; an old map; a key without a lock; a
stray dog; the last tree; a missing book; a loud neighbour; a borrowed
bicycle; a strange noise; a forgotten birthday; a paper lantern; a silver coin
"""

TASKS = """
reverses a string; counts the vowels in a text; checks whether a number is
prime; finds the largest number in a list; removes duplicates from a list;
computes a factorial; merges two sorted lists; returns the Fibonacci numbers
below n; checks whether a word is a palindrome; counts how often each word
occurs; sorts a list of dictionaries by a key; reads a CSV file and prints a
column; converts Celsius to Fahrenheit; flattens a nested list; finds the
second smallest number; computes the greatest common divisor; rotates a list
by k places; validates an email address; finds all pairs with a given sum;
implements a stack with push and pop; implements binary search; computes the
average of the even numbers; groups words by their first letter; counts the
days between two dates; draws a triangle of stars; turns a Roman numeral into
a number; finds the longest common prefix; transposes a matrix; checks
balanced brackets; downloads a web page
"""

LANGUAGES = ('Python', 'Python', 'Python', 'JavaScript', 'Java', 'C++', 'SQL')
TONGUES = ('French', 'German', 'Spanish', 'Italian', 'Portuguese', 'Dutch')

ABOUT = """
Explain {subject} to a child of ten.
What is important to know about {subject}?
Give me five facts about {subject}.
Write a short paragraph about {subject}.
What are the advantages and disadvantages of {subject}?
How did {subject} change the world?
List three common mistakes people make about {subject} and correct them.
Compare {subject} and {other}. How are they alike, how do they differ?
Why should anyone care about {subject}? Answer in three sentences.
Write an introduction to a blog post about {subject}.
Give me a step-by-step guide for someone who is new to {subject}.
Make a quiz of five questions about {subject}, with the answers.
What is the history of {subject}?
Describe {subject} without using difficult words.
I have to give a talk on {subject}. Make an outline with headings and bullets.
What would {person} say about {subject}?
Is it true that {subject} and {other} have something to do with each other?
Suggest a title and a summary for a book about {subject}.
Explain the science behind {subject}, then give an everyday example.
Write a dialogue between {person} and {someone} about {subject}.
Imagine you are {person}. Explain {subject} to me in your own voice.
What questions about {subject} are still open?
Define {subject} in one sentence, then explain it in detail.
Write a product description for something that has to do with {subject}.
"""

TELL = """
Write a short story about {person} and {thing} in {place}.
Write a poem about {thing}.
Describe {place} in the early morning so that one can see it.
Start a story with {person} who finds {thing}.
Write a letter from {person} to {someone} about {thing}.
Pretend that you are {person} in {place}. What did you do today?
Write the opening paragraph of a novel set in {place}.
Plan a weekend in {place} for {person} and {someone}.
Write an email to {person} asking for help with {thing}.
Write a speech that {person} gives at a wedding in {place}.
Tell a joke about {person} and {thing}.
Describe a day in the life of {person} in {place}.
Write a review of a restaurant in {place}, as {person} would.
Give {person} advice on what to do about {thing}.
Write a diary entry of {person} after a long journey to {place}.
"""

CODE = """
Write a {language} function that {task}.
Write a {language} program that {task} and explain how it works.
Show me, with comments, how one {task} in {language}.
Write a {language} function that {task}. Add a few tests.
What is the time complexity of a {language} function that {task}?
My {language} function {task}, but it is slow. How can I make it faster?
"""

MATHS = """
A shop sells {a} apples for {b} euros. How much do {c} apples cost?
{person} has {a} coins, gives away {b} and finds {c}. How many are left?
A train travels {a} kilometres in {b} hours. How far does it go in {c} hours?
What is {a} plus {b} times {c}? Explain each step.
Solve the equation {a}x + {b} = {c} step by step.
A rectangle is {a} metres long and {b} metres wide. Find its area and perimeter.
If {a} workers need {b} days for a job, how long do {c} workers need?
What is {a} percent of {c}? Show how you get there.
The sum of two numbers is {c} and their difference is {b}. Which are they?
How many ways are there to choose {b} books out of {a}?
A die is rolled {b} times. What is the chance of at least one six?
Is {c} divisible by {b}? Explain how you know.
"""

REASON = """
All of the friends of {person} live in {place}. Does {someone}, who lives \
elsewhere, know {person}? Explain.
{person} is older than {someone}, and {someone} is older than {third}. Who is \
the youngest? Explain your reasoning.
If it rains in {place}, {person} stays at home. {person} went out today. What \
follows?
Put these in an order that makes sense and say why: {subject}, {other}, {more}.
Which of these does not belong with the others: {subject}, {other}, {more}?
What could go wrong when {person} has to explain {subject} in {place}?
Argue for and against this: every school should teach {subject}.
"""

TEXT = """
Translate into {tongue}: "I would like to know more about {subject}, please."
Rewrite this politely: "You forgot {thing} again. This is the third time!"
Summarise in one sentence: {person} from {place} read everything about \
{subject}, wrote it down, and gave the notes to {someone}, who lost them.
Find the people and the places in this text: "On Monday {person} left {place} \
with {thing}. {someone} stayed behind in {town} and wrote about {subject}."
Correct the mistakes: "he dont know nothing about {subject} and them was late."
Make a table with two columns, for and against, about {subject}.
Give five words that have to do with {subject} and use each in a sentence.
Write three headlines for a news article about {subject} in {place}.
Turn this into a list: I need {thing}, a book on {subject}, and a ticket to \
{place}.
Extract the numbers: "{person} sold {a} boxes on Monday, {b} on Tuesday and \
{c} on Friday." Return them as JSON.
"""

KINDS = (
  (ABOUT, 6),
  (TELL, 3),
  (CODE, 3),
  (MATHS, 2),
  (REASON, 1),
  (TEXT, 2),
)


def make(count: int, seed: int) -> list[str]:
  """`count` different questions; the first n of more are the same n.

  Raises:
    ValueError: more than there are.
  """
  draw = random.Random(seed)
  forms = [_lines(text) for text, _ in KINDS]
  shares = [share for _, share in KINDS]
  out: dict[str, None] = {}
  for _ in range(20 * count):
    if len(out) == count:
      break
    (kind,) = draw.choices(forms, shares)
    question = draw.choice(kind).format(**_fill(draw))
    out[question[0].upper() + question[1:]] = None
  if len(out) < count:
    raise ValueError(f'count={count}: only {len(out)} questions were found')
  return list(out)


def digest(questions: list[str]) -> str:
  """SHA-256 of the questions, in their order."""
  return hashlib.sha256('\0'.join(questions).encode()).hexdigest()


def _fill(draw: random.Random) -> dict[str, str | int]:
  """One value for every name that a form may have."""
  subject, other, more = draw.sample(_items(SUBJECTS), 3)
  person, someone, third = draw.sample(_items(PEOPLE), 3)
  place, town = draw.sample(_items(PLACES), 2)
  return dict(
    subject=subject,
    other=other,
    more=more,
    person=person,
    someone=someone,
    third=third,
    place=place,
    town=town,
    thing=draw.choice(_items(THINGS)),
    task=draw.choice(_items(TASKS)),
    language=draw.choice(LANGUAGES),
    tongue=draw.choice(TONGUES),
    a=draw.randint(3, 40),
    b=draw.randint(2, 9),
    c=draw.randint(10, 200),
  )


def _items(text: str) -> list[str]:
  return [' '.join(item.split()) for item in text.split(';')]


def _lines(text: str) -> list[str]:
  return text.strip().split('\n')
