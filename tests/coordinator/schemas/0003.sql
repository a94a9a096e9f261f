CREATE TABLE jobs (id VARCHAR NOT NULL, record TEXT NOT NULL, spec TEXT, source VARCHAR, PRIMARY KEY (id));
CREATE TABLE sources (hash VARCHAR NOT NULL, text TEXT NOT NULL, PRIMARY KEY (hash));
CREATE TABLE parts (job VARCHAR NOT NULL, state BLOB NOT NULL, PRIMARY KEY (job));
CREATE TABLE store (id VARCHAR NOT NULL, secret BLOB NOT NULL, PRIMARY KEY (id));
CREATE TABLE tape (last INTEGER NOT NULL, entries BLOB NOT NULL, written_at FLOAT, PRIMARY KEY (last));
CREATE TABLE states (last INTEGER NOT NULL, code VARCHAR NOT NULL, state BLOB NOT NULL, written_at FLOAT, PRIMARY KEY (last));
CREATE TABLE tokens (
    id VARCHAR NOT NULL, hash VARCHAR NOT NULL, name VARCHAR NOT NULL, role VARCHAR NOT NULL, made_at FLOAT NOT NULL,
    expires_at FLOAT NOT NULL, made_by VARCHAR NOT NULL, PRIMARY KEY (id), UNIQUE (hash)
);
INSERT INTO store VALUES ('the-store', x'0102');
INSERT INTO tokens VALUES ('t1', 'the-hash', 'ada', 'user', 1.0, 0.0, 'root');
CREATE TABLE bundles (name VARCHAR NOT NULL, part INTEGER NOT NULL, data BLOB NOT NULL, PRIMARY KEY (name, part));
CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY);
INSERT INTO alembic_version VALUES ('0003');
