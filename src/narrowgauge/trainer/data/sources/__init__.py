"""Sources of text.

A *source* is one word or one path. It is read as a sequence of documents, in an order that depends only on
the source itself: not on the file system, the locale, the date or the number of workers.

| source             | its documents                                                                   |
|--------------------|---------------------------------------------------------------------------------|
| `stdlib`           | each module of the running Python's standard library: ten megabytes that every  |
|                    | machine already has                                                             |
| .txt, .md, .py     | the file cut into pieces of whole paragraphs, about 4 to 16 thousand characters |
| .jsonl, .json      | each line: an object with the text under a key                                  |
| .parquet           | each row: the text in a column                                                  |
| .xml               | each article of a MediaWiki dump (`pages-articles`), converted to plain text    |
| no suffix          | such lines, or each `<doc>` of WikiExtractor (`AA/wiki_00`)                      |
| a directory        | each file below it of a type above, text files uncut; hidden files are skipped, |
|                    | links are followed, and no folder is read twice. Beside data, its README,       |
|                    | licence and scripts are no documents, nor is .json without such lines           |
| a glob             | each matching file of a type above; `**` matches folders                        |
| `hf:NAME`          | each row of a data set of the Hugging Face hub                                  |

All except .parquet may be compressed (.gz, .bz2, .xz, .zst). Text is UTF-8; a byte order mark at its start is
dropped, everything else is kept unchanged, including line endings. Documents of only white space are skipped.
A directory or a glob that leads to a single text file is read as that file.
"""
