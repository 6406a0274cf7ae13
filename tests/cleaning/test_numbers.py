"""The filter `numbers` reads the notations of many languages, and drops only pairs whose numbers contradict."""

import pytest

from nmtkit.cleaning.filters import FILTERS
from nmtkit.cleaning.filters.interface import FilterContext
from nmtkit.cleaning.filters.numbers import readings
from nmtkit.config import Config

GOOD = [
    # Japanese, Chinese, Korean: units of 10,000, decimals and mixed characters
    ("The city has 15,000 inhabitants.", "人口は1万5千人です。"),
    ("It cost 230 million yen.", "費用は2億3000万円でした。"),
    ("It cost 123.45 million yen.", "費用は1億2,345万円でした。"),
    ("150 million people", "1.5億人"),
    ("About 35 million visitors came in 2019.", "2019年には約3,500万人が訪れた。"),
    ("3,000 people came on the 5th.", "5日に三千人が来た。"),
    ("12,000 people in 3 days", "3天内一万二千人"),
    ("The price is 35,000 won.", "가격은 3만5천 원입니다."),
    ("The price is 35,500 won for 2 people.", "2명에 3만 5500원입니다."),
    ("120 million", "1억 2천만"),
    ("1.2 billion people", "12亿人"),
    ("It was 5,600 metres long and 40 wide.", "長さ5千6百メートル、幅40メートル"),
    ("Since 1998, 21,000 pieces were sold.", "1998年以來，已售出2萬1千件。"),
    ("In 2018, 3 laws changed.", "平成30年に3つの法律が変わった。"),
    ("Since 2023 there are 4 of them.", "令和5年から4つある。"),
    ("25 percent of 80 people", "80人の2割5分"),
    # fullwidth digits and separators
    ("12,345 users and 6.5 hours", "１２，３４５人、６．５時間"),
    # Indian groups and units
    ("125 million rupees", "12 crore 50 lakh rupees"),
    ("Rs 150,000 for 2 years", "2 वर्षों के लिए 1,50,000 रुपये"),
    ("123,456 people", "१,२३,४५६ लोग"),
    ("32,500,000 rupees in 2021", "२०२१ में ३ करोड़ २५ लाख रुपये"),
    # Arabic, Persian, Bengali and Thai digits
    ("12,345 people died in 1918.", "توفي ١٢٬٣٤٥ شخصًا في عام ١٩١٨."),
    ("It was 3.5 km and 120 m.", "كانت ٣٫٥ كم و١٢٠ م."),
    ("In 2016, 45 % agreed.", "در سال ۲۰۱۶، ۴۵٪ موافق بودند."),
    ("In 1971, 7 million people fled.", "১৯৭১ সালে ৭০ লাখ মানুষ পালিয়ে যায়।"),
    ("In 2023 there were 12,500 cases.", "ในปี พ.ศ. 2566 มีผู้ป่วย 12,500 ราย"),
    ("150,000 people in 3 years", "1 แสน 5 หมื่นคนใน 3 ปี"),
    # groups with spaces, apostrophes and dots; several numbers in another order
    ("In 2010 12,345 people came.", "12 345 Personen kamen im Jahr 2010."),
    ("In 2010 12,345.50 euros were paid.", "Zapłacono 12 345,50 euro w 2010 roku."),
    ("1,234,567 copies in 30 languages", "30 langues, 1 234 567 exemplaires"),
    ("12,345 francs for 30 days", "30 Tage für 12'345 Franken"),
    ("1,200,000,000 dong in 2 years", "2 năm, 1 tỷ 200 triệu đồng"),
    # old agreements
    ("the 1980s and 3 pm", "die 80er und 15 Uhr"),
    ("at 8 pm and at 10 pm", "um 20 Uhr und um 22 Uhr"),
    ("in 2017 and 2010", "ในปี 2560 และ 2553"),
    ("2 men and one dog", "zwei Männer und ein Hund"),
]
BAD = [
    ("The city has 15,000 inhabitants.", "人口は1万6千人です。"),
    ("It cost 230 million yen.", "費用は2億4000万円でした。"),
    ("The price is 35,000 won.", "가격은 4만5천 원입니다."),
    ("123,456 people", "१,२३,४५७ लोग"),
    ("12,345 people died in 1918.", "توفي ١٢٬٣٤٦ شخصًا في عام ١٩١٨."),
    ("In 2010 12,345 people came.", "12 346 Personen kamen im Jahr 2010."),
    ("127 million rupees", "13 crore 50 lakh rupees"),
    ("In 2018, 3 laws changed.", "平成29年に3つの法律が変わった。"),
    ("Page 17 of the law", "Seite 23 des Gesetzes"),
    ("3 dogs", "5匹の犬"),
]


def dropped(source: str, target: str) -> bool:
    numbers = FILTERS["numbers"].factory(Config(), FilterContext(source_lang="en", target_lang="xx"))
    return bool(numbers.matches(source, target))


@pytest.mark.parametrize(("source", "target"), GOOD)
def test_a_good_pair_is_kept(source: str, target: str) -> None:
    assert not dropped(source, target) and not dropped(target, source)


@pytest.mark.parametrize(("source", "target"), BAD)
def test_a_pair_with_contradicting_numbers_is_dropped(source: str, target: str) -> None:
    assert dropped(source, target) and dropped(target, source)


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("1万5千", "15"), ("1億2,345万", "12345"), ("3億5百", "3000005"), ("2千3百万", "23"),
        ("12 crore 50 lakh", "125"), ("3만 5000", "35"), ("12 345,67", "1234567"), ("1.5億", "15"), ("平成30", "2018"),
        ("1兆2000億", "12"),
    ],
)  # fmt: skip
def test_a_composite_number_has_a_reading_as_one_number(line: str, value: str) -> None:
    (options,) = readings(line)
    assert frozenset([value]) in options


@pytest.mark.parametrize("unit", ["7", "7.", "1万 5 "])
def test_a_line_of_20_000_digits_is_read(unit: str) -> None:
    """`clean` ended with an error at a number of 4,301 digits, and took minutes for 20,000 digits."""
    line = unit * (20_000 // len(unit))
    assert dropped(f"{line} dogs", "58 Hunde") and not dropped(f"{line} dogs", f"{line} Hunde")
