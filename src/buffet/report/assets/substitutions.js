// The page of one sentence and what its words may be exchanged for.

{
  const data = pageData();
  const items = data.words.flatMap((word, place) =>
    word.count
      ? [
          {
            words: [place],
            shade: word.shade,
            title: word.word,
            lines: [["substitutes", word.some]],
            label: `${plural(word.count, "substitute")}${word.flips ? ", one of which flips the answer" : ""}`,
          },
        ]
      : [],
  );
  place("words").append(
    wordMap(
      data.words.map(word => word.word),
      items,
      "The sentence; arrow keys go from word to word",
    ),
  );
  place("numbers").append(
    makeTable({
      caption: "Every word",
      columns: [
        { name: "#", left: true, cell: word => word.rows, key: word => word.row },
        { name: "word", left: true, cell: word => word.word, key: word => word.word },
        { name: "substitutes", cell: word => word.count, key: word => word.count },
        { name: "may be exchanged for", left: true, wrap: true, cell: word => word.all, key: word => word.all },
      ],
      rows: data.words,
      portion: 200,
      sort: { column: "#", direction: "ascending" },
    }),
  );
}
