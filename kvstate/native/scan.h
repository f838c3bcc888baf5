/* Scans the bytes of a request: JSON marks, and members of its object. No state is kept
 * between calls. */
#ifndef KVSTEER_SCAN_H
#define KVSTEER_SCAN_H

#include <stdbool.h>
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

/* Names of lower-case letters and underscores, each followed by a NUL. */
typedef struct {
    const uint8_t *bytes;
    size_t length;
} Names;

/* What is looked for within values: a member with the first of these names that is not null, in
 * lists, and in objects under the other names. walked: so many of the names that are asked for are
 * looked into. depth: in so many lists and objects within each other; what is deeper counts as named. */
typedef struct {
    size_t walked, depth;
    Names names;
} Parts;

#define NO_OBJECT ((size_t)-1)

/* Most members that are found in one object: more are no honest client's. */
enum { MAX_MEMBERS = 64 };

/* name: its place among the names. A member begins behind a brace or comma, and ends before the
 * next one; its value has no space around it. */
typedef struct {
    size_t name, start, end, value, value_end;
} Member;

/* count: of all members. close: the place of the brace that closes the object. is_named: whether
 * a part is named, as Parts says. */
typedef struct {
    Member each[MAX_MEMBERS];
    size_t found, count, close;
    bool is_named;
} Members;

typedef enum { READ_ALL, READ_NO_OBJECT, READ_TOO_MANY } Reading;

/* Finds the members of the JSON object that lies from start to length whose name, however it is
 * escaped, is one of these. READ_NO_OBJECT if it is none, or is cut off; READ_TOO_MANY if there are
 * more than MAX_MEMBERS of them. Accepts more than JSON, but finds in JSON what a decoder finds. */
Reading scan_members(const uint8_t *body, size_t start, size_t length, Names names,
                     const Parts *parts, Members *members);

/* Finds the last brace of a body that begins and ends with one, besides space; false if it does not.
 * is_empty: whether nothing else is between them. */
bool scan_braces(const uint8_t *body, size_t length, size_t *close, bool *is_empty);

/* A part of a body, and what takes its place. */
typedef struct {
    size_t start, end;
    const uint8_t *bytes;
    size_t length;
} Edit;

/* Writes a body with these changes, which are in order and within it, to made, which has room. */
void scan_splice(const uint8_t *body, size_t length, const Edit *edits, size_t count,
                 uint8_t *made);

#endif
