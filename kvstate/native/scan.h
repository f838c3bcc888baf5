/* Scans the bytes of a request: JSON marks, and members of its object. No state is kept
 * between calls. */
#ifndef KVSTEER_SCAN_H
#define KVSTEER_SCAN_H

#include <stddef.h>
#include <stdint.h>

/* brackets: those that open an object or a list. */
typedef struct {
    size_t brackets, quotes, commas;
} Marks;

/* All marks, including those within texts. */
Marks scan_marks(const uint8_t *body, size_t length);

/* The marks that the decoder will see: no escaped quotes, and nothing within texts.
 * max_quotes: with more, the rest is not scanned. */
Marks scan_marks_outside(const uint8_t *body, size_t length, size_t max_quotes);

/* values: brackets that open, and commas, outside of texts. text_bytes: what all texts take at most,
 * decoded: a byte for each as it is written, MOST_WIDTH where a text has one beyond ASCII. */
typedef struct {
    size_t values, text_bytes;
} Sizes;

enum { MOST_WIDTH = 4 };

Sizes scan_sizes(const uint8_t *body, size_t length);

/* A part of a body, from its first byte to the one behind its last. */
typedef struct {
    size_t start, end;
} Span;

#define NO_OBJECT ((size_t)-1)

/* Finds the members of the JSON object that a body is whose name, however it is escaped, is one of
 * these: of lower-case letters and underscores, each followed by a NUL. A member lies between the
 * marks around it: the object's braces and the commas that separate its members. Writes at most
 * `most` spans and returns how many members there are, most + 1 as soon as there are more;
 * NO_OBJECT if the body is none, or is cut off. Accepts more than JSON, but finds in JSON what a decoder finds. */
size_t scan_members(const uint8_t *body, size_t length, const uint8_t *names, size_t names_length,
                    Span *spans, size_t most);

#endif
